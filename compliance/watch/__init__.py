"""Follow a run in progress."""
