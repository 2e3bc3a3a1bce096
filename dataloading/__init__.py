"""Text to samples to shards to batches. Only ``loader`` and ``dali`` import torch."""

from console.interruption import show_in_one_line

show_in_one_line()
