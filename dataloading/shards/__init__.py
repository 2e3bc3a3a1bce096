"""The shard formats: the native layout and the layouts in circulation."""
