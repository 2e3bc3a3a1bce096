"""Look at a machine before a run, and describe it."""
