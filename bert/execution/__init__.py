"""Execution of a step: its batches, and forward and backward passes as operators, CUDA graphs or pipeline stages."""
