"""Attention inside sequences of different lengths in Triton, in 16 or 32 bits and between FP8 products."""
