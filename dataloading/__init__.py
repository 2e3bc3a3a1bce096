"""Text to samples to shards to batches. Only ``loader``, ``loader_choice`` and ``dali`` import torch."""

from console.extras import require_extra
from console.interruption import show_in_one_line

show_in_one_line()
require_extra("train", "numpy", "h5py", "numba", "tokenizers")
