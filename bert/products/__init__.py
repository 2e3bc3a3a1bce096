"""Matrix products in other ways than PyTorch has them: in FP8, and with weight gradients that add up where they are kept."""
