"""Plan of a run: what is feasible on these machines, what of it is fastest, and why the rest is not."""
