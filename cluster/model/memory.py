"""Memory of a rank by part, in bytes: what it holds all the time, and what its largest micro-batch adds.

Shape legend: T tokens, Q rows of the last layer, S sequences, M masked tokens, D hidden, F intermediate, V vocabulary,
H heads, P parameters.
"""

from __future__ import annotations

import numpy as np

from cluster.model.operations import layout_of
from cluster.model.strategy import Strategy
from cluster.model.work import MicroBatches, Work

_STEPS = 16
"""Steps of the plan among which the largest micro-batch is looked for."""


def memory_of_rank(work: Work, strategy: Strategy, nodes: int, ranks: int) -> dict[str, float]:
    """Return the bytes of each part; ``ranks`` are those of a node.

    Activations, and what the loss keeps, are those of the micro-batch that needs the most.

    Raises:
        ValueError: the global batch does not divide over the ranks.
    """
    model, world_size = work.model, nodes * ranks
    layout = layout_of(model)
    elements = layout.padded(world_size)
    shards = {"sharded": ranks, "sharded_world": world_size}.get(strategy.reduction, 1)
    shard = elements / shards
    sharded = strategy.reduction in ("sharded", "sharded_world")
    bucket = max(each.stop - each.start for each in layout.buckets(world_size, strategy.bucket_bytes))
    parts = {
        "weights": 4.0 * elements,
        "gradients": 4.0 * elements,
        # The shard's own gradients and weights lie without gaps beside the moments and the update.
        "moments": 8.0 * shard,
        "update": (12.0 if sharded else 4.0) * shard,
        "reduction buffers": 4.0 * bucket if strategy.reduce_dtype == "bf16" and world_size > 1 else 0.0,
        "activations": 0.0,
        "logits": 0.0,
        "16-bit weights": 0.0,
    }
    for step in range(_STEPS):
        sizes = work.micro_batches(strategy, world_size, step)
        activations_AR, logits_AR = _activations(work, strategy, sizes)
        worst = np.unravel_index(np.argmax(activations_AR + logits_AR), activations_AR.shape)
        if activations_AR[worst] + logits_AR[worst] > parts["activations"] + parts["logits"]:
            parts["activations"], parts["logits"] = float(activations_AR[worst]), float(logits_AR[worst])
    return parts


def _activations(work: Work, strategy: Strategy, sizes: MicroBatches) -> tuple[np.ndarray, np.ndarray]:
    """Bytes that the forward pass keeps for the backward pass, but for the loss; and those of the loss."""
    model, size = work.model, 4 if strategy.precision == "fp32" else 2
    D, F, V, H = model.hidden_size, model.intermediate_size, model.vocab_size, model.num_attention_heads
    T, M = sizes.tokens_AR, sizes.masked_AR
    Q = sizes.sequences + M
    masks = 1 if model.hidden_dropout else 0

    def layer(rows: np.ndarray, pairs: np.ndarray) -> np.ndarray:
        probabilities = 2 * pairs * H * size if model.attention_dropout else 4 * rows * H
        return rows * (8 * D + 2 * F + 2 * masks * D) * size + 16 * rows + probabilities

    activations = T * D * 2 * size + (model.num_hidden_layers - 1) * layer(T, sizes.pairs_AR)
    activations = activations + layer(Q, sizes.last_pairs_AR) + 2 * T * D * size + M * 4 * D * size
    return activations, M * V * (size + 4.0)
