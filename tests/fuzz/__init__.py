"""Fuzzing of all readers of strangers' files: damaged inputs, and what must hold for each of them."""
