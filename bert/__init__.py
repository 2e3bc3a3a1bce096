"""The benchmark program: one timed run of BERT pretraining."""

from console.extras import require_extra
from console.interruption import show_in_one_line

# Call this before any slow import: such imports take seconds, and until this call Ctrl-C would print a traceback.
show_in_one_line()
# Check the packages before their imports, so that the user gets one line that names the missing extra, not a traceback.
require_extra("train", "torch", "safetensors", "google_crc32c", "h5py", "numba", "tokenizers", "scipy")
