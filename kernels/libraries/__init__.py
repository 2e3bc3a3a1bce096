"""Implementations of the ops that call libraries, if these are installed."""
