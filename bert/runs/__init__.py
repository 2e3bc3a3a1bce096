"""A run from its checks to its result, and the evaluation of a checkpoint: what the programs start."""
