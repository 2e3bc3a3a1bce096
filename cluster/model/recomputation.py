"""Costs of recomputation: bytes that an encoder layer keeps for its backward pass, and computations that are done again.

Bytes are those of the GPU's kernels. PyTorch's own on a CPU keep masks and probabilities besides under `none`, and
otherwise as much. While a layer's backward pass runs, what it has computed again is there once, as under `none`.
Shape legend: D hidden, F intermediate, H heads.
"""

from __future__ import annotations

from bert.configuration.sections import ModelConfig, Precision, Recompute

_KEYS_A_GROUP = 64
"""Keys whose dropout attention keeps in one group of bits, as `kernels.triton.attention.tiles` has it."""

REPEATED: dict[Recompute, tuple[str, ...]] = {
    "none": (),
    "selective": ("attention", "gelu", "norm"),
    "full": ("linear", "attention", "gelu", "norm"),
}
"""Kinds of `cluster.model.computations` of which the backward pass of a layer but the last repeats the forward part."""


def kept_bytes(model: ModelConfig, mode: Recompute, precision: Precision, longest_sequence: int) -> int:
    """Return the bytes a token that an encoder layer but the last keeps, its input among them.

    The 16-bit copies of weights that autocast makes come on top, once for all tokens.
    """
    D, F, H = model.hidden_size, model.intermediate_size, model.num_attention_heads
    size = 4 if precision == "fp32" else 2
    # "full" keeps a layer's input alone, from which everything is computed again.
    if mode == "full":
        return size * D
    if mode == "selective":  # input, QKV, products of attention output, FC1 and FC2
        return size * (6 * D + F)
    # Besides: context, the first norm's output, GELU's. In FP8 GELU's is kept as FC2's input, like those of the other three.
    activations = size * (8 * D + F) + (3 * D + F if precision == "fp8" else size * F)
    # Bits are kept for whole groups of keys, so the longest sequence decides, rounded up.
    mask_bytes = H * -(-longest_sequence // _KEYS_A_GROUP) * _KEYS_A_GROUP // 8 if model.attention_dropout else 0
    statistics = 4 * H + 2 * 8  # fp32: of each head's softmax, and of two norms
    return activations + mask_bytes + statistics
