"""Reports on the runs of a folder."""
