"""Guards of a run: checks beforehand, the data guard, private caches, signals."""
