"""Weights and training state in files, and the formats of others."""
