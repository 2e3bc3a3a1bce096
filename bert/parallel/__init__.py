"""Everything that depends on ranks: mesh, reduction, tensor and pipeline parallelism, watchdog."""
