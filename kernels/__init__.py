"""The public ops: tensors in, tensors out. The model calls these and nothing else.

Shape legend: T tokens of the flat stream, Q query tokens, S sequences, M masked tokens, D hidden, H heads, E head size,
F intermediate, V vocabulary, N rows, C classes, P parameters.
"""

from kernels.attention import varlen_attention
from kernels.lamb import LambSegments, LambState, lamb_step
from kernels.reference import (
    cross_entropy_sum,
    dense_gelu,
    dropout_add_layer_norm,
    embedding_layer_norm,
    masked_lm_loss,
)

__all__ = [
    "LambSegments",
    "LambState",
    "cross_entropy_sum",
    "dense_gelu",
    "dropout_add_layer_norm",
    "embedding_layer_norm",
    "lamb_step",
    "masked_lm_loss",
    "varlen_attention",
]
