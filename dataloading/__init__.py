"""Text to samples to shards to batches. Only ``loader``, ``loader_choice`` and ``dali`` import torch."""

from console.extras import require_extra
from console.interruption import show_in_one_line

# Before what takes long to import, so that Ctrl-C is one line then, too.
show_in_one_line()
require_extra("train", "numpy", "h5py", "numba", "tokenizers")
