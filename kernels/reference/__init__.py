"""Every op in plain PyTorch: the definition, the oracle of the tests, and the path on a CPU."""
