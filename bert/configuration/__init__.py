"""Settings of runs, recipes (named sets of settings), and readers of files that contain settings."""
