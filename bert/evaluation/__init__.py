"""Evaluations of a run, and of a checkpoint alone."""
