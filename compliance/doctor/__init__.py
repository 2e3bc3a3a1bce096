"""Looks at a machine before a run, and describes it."""
