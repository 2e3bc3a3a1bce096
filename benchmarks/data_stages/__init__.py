"""CPU benchmarks of the data stages, compared with other implementations."""
