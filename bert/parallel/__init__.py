"""Everything that knows about ranks."""
