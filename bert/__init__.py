"""The benchmark program: one timed run of BERT pretraining."""

from console.extras import require_extra
from console.interruption import show_in_one_line

# Call this first: the following imports take seconds, in which Ctrl-C would print a traceback.
show_in_one_line()
# Check this before any import fails, so that an installation without the extra gets one line that names the extra.
require_extra("train", "torch", "safetensors", "google_crc32c", "h5py", "numba", "tokenizers", "scipy")
