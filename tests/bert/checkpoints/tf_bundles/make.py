"""Makes the TensorFlow checkpoints of this folder, with TensorFlow itself: ``python
tests/bert/checkpoints/tf_bundles/make.py``.

It needs ``tensorflow-cpu``, ``tf_keras`` (made with 2.21), ``google-crc32c`` and ``cramjam``.
The weights are those of ``state``, so that a test knows what a reader has to find:

    tf1            a TF1 Saver, with LAMB's moments and the step
    tf1_snappy     the index of tf1 alone, compressed as that of the benchmark's checkpoint is
    tf1_sharded    the same without moments, divided over two data files
    tf1_sliced     one variable that was partitioned
    tf2            tf.train.Checkpoint(model=...) of the Keras pretrainer of MLPerf 0.7, both heads
    tf2_encoder    tf.train.Checkpoint(encoder=...) without heads, as later converters write it
"""

import os
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
SIZES = {"layers": 2, "hidden": 8, "heads": 2, "intermediate": 16, "vocab": 30, "positions": 12, "segments": 2}
STEP = 28252


def state(sizes: dict[str, int] = SIZES) -> dict[str, np.ndarray]:
    """Weights under the names of Hugging Face's BertForPreTraining, [out, in], each drawn from a seed of its name."""
    return {name: draw(name, shape) for name, shape in shapes(sizes).items()}


def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Normal numbers, fp32."""
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    return generator.standard_normal(shape, dtype=np.float32) * np.float32(0.3)


def shapes(sizes: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """Name to shape, in Hugging Face's terms."""
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
    """The variables of the reference's graph: names with slashes, kernels [in, out]."""
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
    """Write what a TF1 Saver writes."""
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
    """A word table that was partitioned in two."""
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


def keras_layers() -> Any:
    """Layers that own variables of the same names, shapes and object paths as those of the Keras BERT."""
    import tf_keras  # pyright: ignore[reportMissingImports]

    class Table(tf_keras.layers.Layer):
        def __init__(self, rows: int, width: int, name: str) -> None:
            super().__init__(name=name)
            self._sizes = rows, width

        def build(self, _: Any) -> None:
            self.embeddings = self.add_weight("embeddings", shape=self._sizes)
            self.built = True

        def call(self, x: Any) -> Any:
            return x

    class Einsum(tf_keras.layers.Layer):
        def __init__(self, kernel: tuple[int, ...], bias: tuple[int, ...], name: str) -> None:
            super().__init__(name=name)
            self._sizes = kernel, bias

        def build(self, _: Any) -> None:
            self._kernel = self.add_weight("kernel", shape=self._sizes[0])
            self._bias = self.add_weight("bias", shape=self._sizes[1])
            self.built = True

        def call(self, x: Any) -> Any:
            return x

    class Attention(tf_keras.layers.Layer):
        def __init__(self, hidden: int, heads: int) -> None:
            super().__init__(name="self_attention")
            kernel, bias = (hidden, heads, hidden // heads), (heads, hidden // heads)
            self._query_dense = Einsum(kernel, bias, "query")
            self._key_dense = Einsum(kernel, bias, "key")
            self._value_dense = Einsum(kernel, bias, "value")
            self._masked_softmax = tf_keras.layers.Softmax()
            self._dropout = tf_keras.layers.Dropout(0.1)

        def call(self, x: Any) -> Any:
            return self._query_dense(x) + self._key_dense(x) + self._value_dense(x)

    class Transformer(tf_keras.layers.Layer):
        def __init__(self, sizes: dict[str, int], name: str) -> None:
            super().__init__(name=name)
            self._sizes = tuple(sizes[key] for key in ("hidden", "heads", "intermediate"))

        def build(self, _: Any) -> None:
            hidden, heads, wide = self._sizes
            self._attention_layer = Attention(hidden, heads)
            self._attention_output_dense = Einsum((heads, hidden // heads, hidden), (hidden,), "self_attention_output")
            self._attention_dropout = tf_keras.layers.Dropout(0.1)
            self._attention_layer_norm = tf_keras.layers.LayerNormalization(name="self_attention_layer_norm")
            self._intermediate_dense = Einsum((hidden, wide), (wide,), "intermediate")
            self._intermediate_activation_layer = tf_keras.layers.Activation("relu")
            self._output_dense = Einsum((wide, hidden), (hidden,), "output")
            self._output_dropout = tf_keras.layers.Dropout(0.1)
            self._output_layer_norm = tf_keras.layers.LayerNormalization(name="output_layer_norm")
            self.built = True

        def call(self, x: Any) -> Any:
            # The variables must exist under their names; what is computed with them does not matter here.
            x = self._attention_output_dense(self._attention_layer(x))
            x = self._attention_layer_norm(self._attention_dropout(x))
            x = self._output_dropout(self._output_dense(self._intermediate_dense(x)))
            return self._output_layer_norm(x)

    class Bias(tf_keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self._bias = self.add_weight("bias", shape=shape[1:])
            self.built = True

        def call(self, x: Any) -> Any:
            return x

    return Table, Transformer, Bias


def keras_encoder(sizes: dict[str, int]) -> Any:
    """The encoder: tables, norm, layers, pooler."""
    import tf_keras  # pyright: ignore[reportMissingImports]

    Table, Transformer, _ = keras_layers()
    hidden = sizes["hidden"]
    inputs = [tf_keras.layers.Input((hidden,), name=f"input_{name}") for name in ("word_ids", "mask", "type_ids")]
    word = Table(sizes["vocab"], hidden, "word_embeddings")(inputs[0])
    position = Table(sizes["positions"], hidden, "position_embedding")(word)
    segment = Table(sizes["segments"], hidden, "type_embeddings")(inputs[2])
    x = tf_keras.layers.Add()([word, position, segment])
    x = tf_keras.layers.LayerNormalization(name="embeddings/layer_norm")(x)
    x = tf_keras.layers.Dropout(0.1)(x)
    mask = tf_keras.layers.Add()([x, inputs[1]])
    x = tf_keras.layers.Add()([x, mask])
    for index in range(sizes["layers"]):
        x = Transformer(sizes, f"transformer/layer_{index}")(x)
    pooled = tf_keras.layers.Dense(hidden, activation="tanh", name="pooler_transform")(x)
    return tf_keras.Model(inputs, [x, pooled])


def keras_pretrainer(sizes: dict[str, int]) -> Any:
    """The encoder inside a model with both heads, each a model of its own."""
    import tf_keras  # pyright: ignore[reportMissingImports]

    _, _, Bias = keras_layers()
    encoder, hidden = keras_encoder(sizes), sizes["hidden"]
    sequence, pooled = encoder(encoder.inputs)

    data = tf_keras.layers.Input((hidden,), name="sequence_data")
    x = tf_keras.layers.Dense(hidden, name="cls/predictions/transform/dense")(data)
    x = tf_keras.layers.LayerNormalization(name="cls/predictions/transform/LayerNorm")(x)
    x = tf_keras.layers.Lambda(lambda x: x[:, :1] * np.ones((1, sizes["vocab"]), np.float32))(x)
    x = Bias(name="cls/predictions/output_bias")(x)
    masked_lm = tf_keras.Model(data, x, name="masked_lm")

    data = tf_keras.layers.Input((hidden,), name="cls_output")
    x = tf_keras.layers.Dense(2, name="predictions/transform/logits")(data)
    classification = tf_keras.Model(data, x, name="classification")
    return tf_keras.Model(encoder.inputs, [masked_lm(sequence), classification(pooled)])


def assign(model: Any, sizes: dict[str, int]) -> None:
    """Give every variable, found by its name, the weights of ``state``."""
    replacements = (
        ("transformer/layer_", "bert/encoder/layer_"),
        ("self_attention_output/", "attention/output/dense/"),
        ("self_attention_layer_norm/", "attention/output/LayerNorm/"),
        ("self_attention/", "attention/self/"),
        ("/intermediate/", "/intermediate/dense/"),
        ("/output/kernel", "/output/dense/kernel"),
        ("/output/bias", "/output/dense/bias"),
        ("output_layer_norm/", "output/LayerNorm/"),
        ("embeddings/layer_norm/", "bert/embeddings/LayerNorm/"),
        ("pooler_transform/", "bert/pooler/dense/"),
        ("output_bias/bias", "output_bias"),
        ("predictions/transform/logits/kernel", "cls/seq_relationship/output_weights"),
        ("predictions/transform/logits/bias", "cls/seq_relationship/output_bias"),
        ("word_embeddings/embeddings", "bert/embeddings/word_embeddings"),
        ("position_embedding/embeddings", "bert/embeddings/position_embeddings"),
        ("type_embeddings/embeddings", "bert/embeddings/token_type_embeddings"),
    )
    arrays = tf1_variables(sizes)
    for variable in model.variables:
        name = variable.name.removesuffix(":0")
        for ours, theirs in replacements:
            name = name.replace(ours, theirs)
        array = arrays[name].T if name.endswith("output_weights") else arrays[name]
        variable.assign(array.reshape(variable.shape))


def write_tf2(prefix: Path, sizes: dict[str, int], *, heads: bool) -> None:
    """Write what ``tf.train.Checkpoint.save`` writes."""
    import tensorflow as tf  # pyright: ignore[reportMissingImports, reportMissingModuleSource]

    model = keras_pretrainer(sizes) if heads else keras_encoder(sizes)
    assign(model, sizes)
    written = tf.train.Checkpoint(**{"model" if heads else "encoder": model}).save(str(prefix))
    for path in prefix.parent.glob(f"{Path(written).name}.*"):
        path.rename(path.with_name(path.name.replace(Path(written).name, prefix.name)))
    (prefix.parent / "checkpoint").unlink()


def compress_index(source: Path, target: Path) -> None:
    """The same index of one data block, with that block packed by Snappy."""
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
    """Write every checkpoint of the list above."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    write_tf1(folder / "tf1", SIZES, moments=True)
    compress_index(folder / "tf1.index", folder / "tf1_snappy.index")
    write_tf1(folder / "tf1_sharded", SIZES, moments=False, devices=2)
    write_sliced(folder / "tf1_sliced")
    write_tf2(folder / "tf2", SIZES, heads=True)
    write_tf2(folder / "tf2_encoder", SIZES, heads=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
