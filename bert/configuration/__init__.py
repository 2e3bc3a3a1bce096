"""The settings of a run: what there is to set, named sets of settings, and where they come from."""
