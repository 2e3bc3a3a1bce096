"""Attention in Triton inside sequences of different lengths, in bf16, fp16 or fp32, and with casts to FP8."""
