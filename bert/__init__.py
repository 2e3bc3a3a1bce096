"""The benchmark program: one timed run of BERT pretraining."""

from console.extras import require_extra
from console.interruption import show_in_one_line

show_in_one_line()
require_extra("train", "torch", "safetensors", "google_crc32c", "h5py", "numba", "tokenizers", "scipy")
