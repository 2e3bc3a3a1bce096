"""Fuzzing of all readers of untrusted files: damaged inputs, and checks that must hold for each of them."""
