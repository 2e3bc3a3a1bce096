"""The log of a run: its number, its head, its records, whole lines with digests."""
