"""Attention of sequences of different lengths in Triton, also between products in FP8."""
