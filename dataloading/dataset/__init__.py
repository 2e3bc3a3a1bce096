"""A folder of shards: open, verify, shuffle, convert."""
