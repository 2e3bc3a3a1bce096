"""Measured choice among implementations, and the inputs that ops are tried with."""
