"""The formats of shards: our own, and those in circulation."""
