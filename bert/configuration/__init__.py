"""The settings of a run, the recipes (named sets of settings), and the files from which settings are read."""
