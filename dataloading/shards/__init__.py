"""The formats of shards: the native layout, and the layouts that other programs use."""
