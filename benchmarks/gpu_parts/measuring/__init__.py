"""Code that the parts share: sizes, timing, the report's rows, and the table."""
