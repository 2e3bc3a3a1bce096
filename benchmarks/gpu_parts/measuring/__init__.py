"""What the parts share: sizes, times, rows of figures and their page."""
