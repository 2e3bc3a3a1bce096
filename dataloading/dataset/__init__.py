"""A folder of shards: open, verify, merge, shuffle."""
