"""Preloaded by a fork server: one call of a compiled function loads Numba for all processes that it forks."""

from tests.dataloading.shards.tfrecord.edge_samples import edge_samples

edge_samples()
