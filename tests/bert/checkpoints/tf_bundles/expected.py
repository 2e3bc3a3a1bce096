"""Weights in the TensorFlow checkpoints of this folder, drawn again. TensorFlow 2.21 wrote the checkpoints:

tf1            a TF1 Saver, with LAMB's moments and the step
tf1_snappy     the index of tf1 alone, compressed as that of the benchmark's checkpoint is
tf1_sharded    the same without moments, divided over two data files
tf1_sliced     one variable that was partitioned
"""

import zlib
from pathlib import Path

import numpy as np

BUNDLES = Path(__file__).parent
SIZES = {"layers": 2, "hidden": 8, "heads": 2, "intermediate": 16, "vocab": 30, "positions": 12, "segments": 2}


def bundle_weights(sizes: dict[str, int] = SIZES) -> dict[str, np.ndarray]:
    """Return weights by their names in Hugging Face's BertForPreTraining, [out, in], each from its own seed."""
    return {name: _draw(name, shape) for name, shape in bundle_shapes(sizes).items()}


def _draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    return generator.standard_normal(shape, dtype=np.float32) * np.float32(0.3)


def bundle_shapes(sizes: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight under its Hugging Face name."""
    hidden, wide = sizes["hidden"], sizes["intermediate"]
    embeddings = "bert.embeddings."
    result: dict[str, tuple[int, ...]] = {
        embeddings + "word_embeddings.weight": (sizes["vocab"], hidden),
        embeddings + "position_embeddings.weight": (sizes["positions"], hidden),
        embeddings + "token_type_embeddings.weight": (sizes["segments"], hidden),
    }
    dense = {"bert.pooler.dense": (hidden, hidden), "cls.predictions.transform.dense": (hidden, hidden)}
    norms = [embeddings + "LayerNorm", "cls.predictions.transform.LayerNorm"]
    for index in range(sizes["layers"]):
        layer = f"bert.encoder.layer.{index}."
        dense |= {f"{layer}attention.self.{part}": (hidden, hidden) for part in ("query", "key", "value")}
        dense[layer + "attention.output.dense"] = (hidden, hidden)
        dense[layer + "intermediate.dense"] = (wide, hidden)
        dense[layer + "output.dense"] = (hidden, wide)
        norms += [layer + "attention.output.LayerNorm", layer + "output.LayerNorm"]
    dense["cls.seq_relationship"] = (2, hidden)
    for name, shape in dense.items():
        result |= {name + ".weight": shape, name + ".bias": shape[:1]}
    for name in norms:
        result |= {name + ".weight": (hidden,), name + ".bias": (hidden,)}
    return result | {"cls.predictions.bias": (sizes["vocab"],)}
