"""Alternatives to PyTorch's matrix products: FP8 products, and products that add to weight gradients in place."""
