"""Expected weights of the TensorFlow checkpoints in this folder, which TensorFlow 2.21 wrote:

tf1            a TF1 Saver, with LAMB's moments and the step
tf1_snappy     only the index of tf1, compressed like the index of the benchmark's checkpoint
tf1_sharded    tf1 without moments, in two data files
tf1_sliced     one partitioned variable
"""

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bert.checkpoints.hugging_face import to_hugging_face
from bert.configuration.sections import ModelConfig
from bert.model import BertForPreTraining

BUNDLES = Path(__file__).parent


def bundle_weights() -> dict[str, np.ndarray]:
    """Return weights, [out, in], by their names in Hugging Face's BertForPreTraining. Each is drawn with its own seed."""
    tensors = to_hugging_face(BertForPreTraining(ModelConfig(2, 8, 2, 16, 30, 12)).state_dict())
    return {name: _draw(name, tensor.shape) for name, tensor in tensors.items() if ".decoder." not in name}


def _draw(name: str, shape: Sequence[int]) -> np.ndarray:
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    return generator.standard_normal(shape, dtype=np.float32) * np.float32(0.3)
