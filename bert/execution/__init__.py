"""Execution of a step: preparation of batches, and passes that run operator by operator or as CUDA graphs."""
