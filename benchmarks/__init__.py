"""Comparisons side by side; every figure in the README comes from a file here."""
