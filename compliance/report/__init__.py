"""Report on the runs of a folder."""
