"""The ops in Triton, one file an op; rooms for attention and for layer norms."""
