"""Choice of the fastest feasible way to run a recipe on given machines."""
