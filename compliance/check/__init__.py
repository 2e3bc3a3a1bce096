"""Check a log and print the findings."""
