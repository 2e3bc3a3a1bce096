"""All that knows about ranks: mesh, reduction, tensor and pipeline parallelism, watchdog."""
