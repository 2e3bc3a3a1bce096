"""The benchmark program: one timed run of BERT pretraining."""

from console.extras import require_extra
from console.interruption import show_in_one_line

# First, since what follows imports for seconds, in which Ctrl-C would end in a traceback.
show_in_one_line()
# Before any module imports one of these: an installation without the extra gets one line that names it.
require_extra("train", "torch", "safetensors", "google_crc32c", "h5py", "numba", "tokenizers", "scipy")
