"""The public ops on tensors, the types of their arguments, and functions that choose the ops' implementations.

Shape legend: T tokens of the flat stream, Q query tokens, S sequences, M masked tokens, D hidden, H heads, E head size,
F intermediate, V vocabulary, L positions, N rows, C classes, P parameters.
"""
# ruff: noqa: F401

from importlib.util import find_spec

if find_spec("torch") is None:
    raise ModuleNotFoundError("torch is not installed: pip install '.[train]'", name="torch")

from kernels.ops import OPS, choose, only_capturable
from kernels.reference.fp8 import (
    add_norm_backward_cast_fp8,
    add_norm_cast_fp8,
    attention_backward_cast_fp8,
    attention_cast_fp8,
    bias_gelu_backward_cast_fp8,
    bias_gelu_cast_fp8,
    cast_fp8,
    cast_transpose_fp8,
    cast_transpose_into_fp8,
    cast_transpose_sum_fp8,
    new_scales,
    scaled_matmul,
)
from kernels.reference.lamb import (
    LambHyperparameters,
    LambSegments,
    LambState,
    WeightCast,
    lamb_apply,
    lamb_directions,
    lamb_step,
    sum_of_squares,
)
from kernels.reference.ops import (
    IGNORED,
    accumulate_weight_gradient,
    bias_gelu,
    compute_dtype,
    cross_entropy_sum,
    dense_gelu,
    dropout_add_layer_norm,
    embedding_layer_norm,
    masked_lm_logits,
    masked_lm_loss,
    varlen_attention,
    varlen_self_attention,
)
from kernels.reference.random import Dropout
