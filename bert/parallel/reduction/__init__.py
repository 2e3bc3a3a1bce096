"""Sums of gradients over copies of the model, and LAMB on this rank's part of them.

gradients.py      buckets of the flat gradient, summed beside backward
sharded_gradients.py  the same if a rank keeps only its shard of them
choice.py         the faster strategy, measured before the clock starts
sums.py           sums of a vector by the type that travels
sharded_lamb.py   LAMB on a rank's shard, and the gathering of weights after it
"""
