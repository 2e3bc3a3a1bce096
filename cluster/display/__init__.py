"""Output of `python -m cluster show`."""
