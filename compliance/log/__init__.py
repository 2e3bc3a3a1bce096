"""Logs: their rules as data, their records, their digests, and the findings of a check."""
