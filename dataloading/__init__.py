"""Conversion of text to samples, shards and batches. Only ``loader``, ``loader_choice`` and ``dali`` import torch."""

from console.extras import require_extra
from console.interruption import show_in_one_line

# Called before slow imports, so that Ctrl-C during an import prints one line.
show_in_one_line()
require_extra("train", "numpy", "h5py", "numba", "tokenizers")
