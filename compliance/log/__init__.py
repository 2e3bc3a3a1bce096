"""A log: its rules as data, its records, its digest, and what a check finds."""
