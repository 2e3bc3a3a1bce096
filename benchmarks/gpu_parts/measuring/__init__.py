"""Measuring as the parts share it: sizes, times, rows of figures and their page."""
