"""Checks folders of logs and whole submissions."""
