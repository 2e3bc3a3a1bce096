"""Fuzzing of all readers of strangers' files: damaged inputs, and checks that must hold for each of them."""
