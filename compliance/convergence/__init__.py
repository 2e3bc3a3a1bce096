"""Reference convergence points, and where a set of runs stands against them."""
