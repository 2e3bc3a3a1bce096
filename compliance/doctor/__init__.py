"""Checks of a machine before a run, and its system description."""
