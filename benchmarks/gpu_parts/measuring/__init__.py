"""Sizes, times, rows of figures and their page, which the parts share."""
