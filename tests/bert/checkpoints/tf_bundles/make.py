"""Makes the TensorFlow checkpoints of this folder, with TensorFlow itself: ``python
tests/bert/checkpoints/tf_bundles/make.py``.

It needs ``tensorflow-cpu`` (made with 2.21), ``google-crc32c`` and ``cramjam``.
The weights are those of ``state``, so that a test knows what a reader has to find:

    tf1            a TF1 Saver, with LAMB's moments and the step
    tf1_snappy     the index of tf1 alone, compressed as that of the benchmark's checkpoint is
    tf1_sharded    the same without moments, divided over two data files
    tf1_sliced     one variable that was partitioned
"""

import os
import struct
import sys
import zlib
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
SIZES = {"layers": 2, "hidden": 8, "heads": 2, "intermediate": 16, "vocab": 30, "positions": 12, "segments": 2}
STEP = 28252


def state(sizes: dict[str, int] = SIZES) -> dict[str, np.ndarray]:
    """Return weights by their names in Hugging Face's BertForPreTraining, [out, in], each from its own seed."""
    return {name: draw(name, shape) for name, shape in shapes(sizes).items()}


def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Draw normally distributed numbers in fp32."""
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    return generator.standard_normal(shape, dtype=np.float32) * np.float32(0.3)


def shapes(sizes: dict[str, int]) -> dict[str, tuple[int, ...]]:
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


def tf1_variables(sizes: dict[str, int]) -> dict[str, np.ndarray]:
    """Return the variables of the reference's graph: names with slashes, kernels [in, out]."""
    result = {}
    for name, array in state(sizes).items():
        theirs = name.replace(".layer.", ".layer_").replace(".", "/")
        if "embeddings/" in theirs and "LayerNorm" not in theirs:
            theirs = theirs.removesuffix("/weight")
        elif "LayerNorm" in theirs:
            theirs = theirs.replace("/weight", "/gamma").replace("/bias", "/beta")
        elif "seq_relationship" in theirs:
            theirs = theirs.replace("/weight", "/output_weights").replace("/bias", "/output_bias")
        elif theirs == "cls/predictions/bias":
            theirs = "cls/predictions/output_bias"
        elif theirs.endswith("/weight"):
            theirs, array = theirs.removesuffix("weight") + "kernel", array.T
        result[theirs] = array
    return result


def write_tf1(prefix: Path, sizes: dict[str, int], *, moments: bool, devices: int = 1) -> None:
    """Write the files of a TF1 Saver."""
    import tensorflow.compat.v1 as tf  # pyright: ignore[reportMissingImports]

    with tf.Graph().as_default():
        variables = []
        for index, (name, array) in enumerate(tf1_variables(sizes).items()):
            arrays = {name: array}
            if moments:
                arrays |= {f"{name}/lamb_m": np.zeros_like(array), f"{name}/lamb_v": np.ones_like(array)}
            with tf.device(f"/cpu:{index % devices}"):
                for each, value in arrays.items():
                    placeholder = tf.placeholder(tf.float32, value.shape)
                    variables.append((tf.Variable(placeholder, name=each, use_resource=False), placeholder, value))
        step = tf.Variable(np.int64(STEP), name="global_step", dtype=tf.int64, use_resource=False)
        with tf.Session(config=tf.ConfigProto(device_count={"CPU": devices})) as session:
            session.run(step.initializer)
            for variable, placeholder, value in variables:
                session.run(variable.initializer, {placeholder: value})
            saver = tf.train.Saver(sharded=devices > 1)
            saver.save(session, str(prefix), write_meta_graph=False, write_state=False)


def write_sliced(prefix: Path) -> None:
    """Write a word table that is partitioned in two."""
    import tensorflow.compat.v1 as tf  # pyright: ignore[reportMissingImports]

    with tf.Graph().as_default():
        tf.get_variable(
            "bert/embeddings/word_embeddings",
            (6, 4),
            initializer=tf.ones_initializer(),
            partitioner=tf.fixed_size_partitioner(2),
            use_resource=False,
        )
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            tf.train.Saver().save(session, str(prefix), write_meta_graph=False, write_state=False)


def compress_index(source: Path, target: Path) -> None:
    """Write the same index with its one data block compressed by Snappy."""
    import cramjam  # pyright: ignore[reportMissingImports]
    import google_crc32c

    def number(value: int) -> bytes:
        return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + number(value >> 7)

    def trailer(block: bytes, kind: bytes) -> bytes:
        checksum = google_crc32c.value(block + kind)
        return kind + struct.pack("<I", ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    content = source.read_bytes()
    empty = struct.pack("<II", 0, 1)
    data = content[: content.index(empty + trailer(empty, b"\0")) - 5]
    packed = bytes(cramjam.snappy.compress_raw(data))
    handle = number(0) + number(len(packed))
    index = b"\0\1" + number(len(handle)) + b"z" + handle + empty
    blocks = [packed + trailer(packed, b"\1"), empty + trailer(empty, b"\0"), index + trailer(index, b"\0")]
    ends = [len(blocks[0]), len(blocks[0]) + len(blocks[1])]
    footer = number(ends[0]) + number(len(empty)) + number(ends[1]) + number(len(index))
    target.write_bytes(b"".join(blocks) + footer.ljust(40, b"\0") + content[-8:])


def main(folder: Path) -> None:
    """Write every checkpoint listed above."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    write_tf1(folder / "tf1", SIZES, moments=True)
    compress_index(folder / "tf1.index", folder / "tf1_snappy.index")
    write_tf1(folder / "tf1_sharded", SIZES, moments=False, devices=2)
    write_sliced(folder / "tf1_sliced")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
