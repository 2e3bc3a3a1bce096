"""Sums of gradients over copies of the model, and LAMB on what a rank has of them.

gradients.py           buckets of the flat gradient, summed beside backward
sharded_gradients.py   the same where a rank keeps its shard of the sums alone
choice.py              the faster way, measured before the clock starts
sums.py                sums of a vector by the type that travels
sharded_lamb.py        LAMB on a rank's shard, and whole weights again
"""
