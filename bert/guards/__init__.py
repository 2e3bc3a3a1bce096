"""Guards of a run: preflight checks, the data guard, private caches, and the handling of signals."""
