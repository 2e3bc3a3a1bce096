"""Compare sets of runs with the reference convergence points."""
