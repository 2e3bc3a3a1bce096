"""Expected weights of the TensorFlow checkpoints in this folder, which TensorFlow 2.21 wrote:

tf1            a TF1 Saver, with LAMB's moments and the step
tf1_snappy     only the index of tf1, compressed like the index of the benchmark's checkpoint
tf1_sharded    tf1 without moments, in two data files
tf1_sliced     one partitioned variable
"""

import zlib
from pathlib import Path

import numpy as np

BUNDLES = Path(__file__).parent
LAYERS, HIDDEN, INTERMEDIATE, VOCAB, POSITIONS, SEGMENTS = 2, 8, 16, 30, 12, 2


def bundle_weights() -> dict[str, np.ndarray]:
    """Return weights by their names in Hugging Face's BertForPreTraining, [out, in], each from its own seed."""
    return {name: _draw(name, shape) for name, shape in _shapes().items()}


def _draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    return generator.standard_normal(shape, dtype=np.float32) * np.float32(0.3)


def _shapes() -> dict[str, tuple[int, ...]]:
    embeddings = "bert.embeddings."
    result: dict[str, tuple[int, ...]] = {
        embeddings + "word_embeddings.weight": (VOCAB, HIDDEN),
        embeddings + "position_embeddings.weight": (POSITIONS, HIDDEN),
        embeddings + "token_type_embeddings.weight": (SEGMENTS, HIDDEN),
    }
    square = ["bert.pooler.dense", "cls.predictions.transform.dense"]
    norms = [embeddings + "LayerNorm", "cls.predictions.transform.LayerNorm"]
    dense = {"cls.seq_relationship": (2, HIDDEN)}
    for index in range(LAYERS):
        layer = f"bert.encoder.layer.{index}."
        square += [f"{layer}attention.{part}" for part in ("self.query", "self.key", "self.value", "output.dense")]
        dense |= {layer + "intermediate.dense": (INTERMEDIATE, HIDDEN), layer + "output.dense": (HIDDEN, INTERMEDIATE)}
        norms += [layer + "attention.output.LayerNorm", layer + "output.LayerNorm"]
    for name, shape in (dense | dict.fromkeys(square, (HIDDEN, HIDDEN))).items():
        result |= {name + ".weight": shape, name + ".bias": shape[:1]}
    for name in norms:
        result |= {name + ".weight": (HIDDEN,), name + ".bias": (HIDDEN,)}
    return result | {"cls.predictions.bias": (VOCAB,)}
