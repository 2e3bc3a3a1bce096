"""The log of a run: its number, header and records, written as whole lines with digests."""
