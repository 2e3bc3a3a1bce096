"""Text to samples to shards to batches. Only ``loader`` and ``dali`` import torch."""
