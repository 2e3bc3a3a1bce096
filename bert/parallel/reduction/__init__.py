"""Sums of gradients over copies of the model, and LAMB on this rank's shard of them.

gradients.py      sums buckets of the flat gradient during the backward pass, in fp32 or bf16
sharded_gradients.py  the same if a rank keeps only its shard of the gradients
choice.py         measures the faster strategy before the clock starts
sharded_lamb.py   LAMB on a rank's shard, and the gathering of weights after it
"""
