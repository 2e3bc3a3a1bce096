"""Measured choice among implementations, what it keeps, and the inputs that it measures with."""
