"""Side-by-side comparisons; every figure in the README comes from a file here."""
