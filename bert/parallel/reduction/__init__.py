"""Sums of gradients over copies of the model, and LAMB on a rank's shard of the weights.

gradients.py          sums buckets of the flat gradient during the backward pass, and chooses a strategy
sharded_gradients.py  sums buckets if a rank keeps only its shard of the gradients
between_sites.py      sums a vector over groups of hosts with slow links between them
sharded_lamb.py       updates a rank's shard of the weights by LAMB, and gathers the new weights
"""
