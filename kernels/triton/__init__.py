"""Implementations of the ops in Triton. Each op has a file; attention and the layer norms have folders."""
