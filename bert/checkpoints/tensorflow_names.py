"""Names of BERT's variables in TensorFlow's checkpoints: those of the reference, and those of its Keras model."""

import re

_TF1_ENDINGS = {
    "embeddings.weight": "embeddings",
    "LayerNorm.weight": "LayerNorm/gamma",
    "LayerNorm.bias": "LayerNorm/beta",
    "seq_relationship.weight": "seq_relationship/output_weights",
    "seq_relationship.bias": "seq_relationship/output_bias",
    "predictions.bias": "predictions/output_bias",
    ".weight": ".kernel",
}
_TF2_PARTS = (
    (r"^bert/embeddings/word_embeddings$", "word_embeddings/embeddings"),
    (r"^bert/embeddings/position_embeddings$", "position_embedding/embeddings"),
    (r"^bert/embeddings/token_type_embeddings$", "type_embeddings/embeddings"),
    (r"^bert/embeddings/LayerNorm/", "embeddings/layer_norm/"),
    (r"^bert/encoder/", "transformer/"),
    (r"/attention/output/dense/", "/self_attention_output/"),
    (r"/attention/output/LayerNorm/", "/self_attention_layer_norm/"),
    (r"/attention/self/", "/self_attention/"),
    (r"/(intermediate|output)/dense/", r"/\1/"),
    (r"/output/LayerNorm/", "/output_layer_norm/"),
    (r"^bert/pooler/dense/", "pooler_transform/"),
    (r"^cls/predictions/output_bias$", "cls/predictions/output_bias/bias"),
    (r"^cls/seq_relationship/output_weights$", "predictions/transform/logits/kernel"),
    (r"^cls/seq_relationship/output_bias$", "predictions/transform/logits/bias"),
)


def tf1_name(name: str) -> str:
    """The name of a weight in the reference's graph, from that in Hugging Face's ``BertForPreTraining``."""
    for theirs, ours in _TF1_ENDINGS.items():
        if name.endswith(theirs):
            name = name.removesuffix(theirs) + ours
            break
    return re.sub(r"\.layer\.(\d+)", r".layer_\1", name).replace(".", "/")


def tf2_names(name: str) -> list[str]:
    """The names that the variable can have in the Keras model of TensorFlow's model garden.

    They are those of its converter of checkpoints, which finds variables by them
    (official/nlp/bert/tf1_checkpoint_converter_lib); the second of two is that of its later versions.
    """
    name = tf1_name(name)
    for theirs, ours in _TF2_PARTS:
        name = re.sub(theirs, ours, name)
    later = name.replace("/self_attention_output/", "/self_attention/attention_output/")
    return [name, f"bert/{name}"] if name.startswith("cls/") else [name, later]
