"""Measurement and choice of op implementations, and example inputs for the ops."""
