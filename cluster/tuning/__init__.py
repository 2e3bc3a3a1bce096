"""Number of processes and threads for a recipe, measured on this machine and kept."""
