"""Output of all programs: what they print and draw in a terminal, and files that are written whole or not at all."""
