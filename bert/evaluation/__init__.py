"""Evaluation of the model, during a run or from a checkpoint alone."""
