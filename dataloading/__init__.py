"""Text to samples, shards and batches. Only ``loader``, ``loader_choice`` and ``dali`` import torch."""

from console.extras import require_extra
from console.interruption import show_in_one_line

# Before slow imports, so that Ctrl-C during them prints one line.
show_in_one_line()
require_extra("train", "numpy", "h5py", "numba", "tokenizers")
