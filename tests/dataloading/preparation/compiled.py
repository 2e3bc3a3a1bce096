"""Module that a fork server preloads. It calls a compiled function, so that all forked processes share the loaded Numba."""

from tests.dataloading.shards.tfrecord.edge_samples import edge_samples

edge_samples()
