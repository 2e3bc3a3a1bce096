"""Sums of gradients over copies of the model, and LAMB on this rank's shard of them.

gradients.py      sums buckets of the flat gradient during the backward pass, and chooses a strategy
sharded_gradients.py  sums buckets if a rank keeps only its shard of the gradients
sharded_lamb.py   LAMB on a rank's shard, and the gathering of weights after it
"""
