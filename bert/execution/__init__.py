"""Execution of a step: CUDA graphs, the phase that a rank is in, and the seconds spent in each phase."""
