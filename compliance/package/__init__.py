"""Make a submission from a folder of runs."""
