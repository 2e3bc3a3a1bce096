"""Preloaded by a fork server: this call of a compiled function loads Numba once for all processes that it forks."""

from tests.dataloading.shards.tfrecord.edge_samples import edge_samples

edge_samples()
