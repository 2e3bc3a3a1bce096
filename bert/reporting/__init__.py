"""Collection of a run's records, and their display."""
