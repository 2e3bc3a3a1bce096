"""Data sets, which are folders of shards: opening, verifying, indexing and shuffling."""
