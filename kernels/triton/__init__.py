"""The ops in Triton, one file an op."""
