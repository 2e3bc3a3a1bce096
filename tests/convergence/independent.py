"""Pretraining by independent code: Hugging Face's BERT on padded batches, and LAMB tensor by tensor.

``test_agreement.py`` compares the program with this simple implementation of the benchmark. Samples, settings and
initial weights come from the program. LAMB, the schedule, and the parameters excluded from decay and adaptation follow
the reference's ``lamb_optimizer_v1.py`` and ``optimization.py`` (MLPerf Training, ``retired_benchmarks/bert``):
variables are processed one by one and excluded by name. Norms are computed in float64 for weights of any dtype.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.training.hugging_face import model_with_weights_of, padded
from bert.configuration.sections import OptimizerConfig
from bert.model import BertForPreTraining
from dataloading.shards.samples import Samples


@dataclass(frozen=True)
class Side:
    """Variant of the training in a comparison: its number format and its order of summation."""

    dtype: torch.dtype
    """Dtype of weights, gradients and moments."""
    micro_batches: int = 1
    """Number of micro-batches per global batch. Each one is padded to its longest sample."""
    reverse: bool = False
    """Whether a global batch's samples are in reverse order."""
    attention: Literal["sdpa", "eager"] = "sdpa"


@dataclass
class Trained:
    """Results of a run: each step's losses and gradient norm, and the final weights in float64 by Hugging Face's names."""

    steps: list[dict[str, float]]
    weights: dict[str, Tensor]


def train(side: Side, initial: BertForPreTraining, batches: Iterable[Samples], optimizer: OptimizerConfig) -> Trained:
    """Train from the weights of ``initial``, one step for each global batch."""
    model: Any = model_with_weights_of(initial).to(side.dtype).train()
    model.set_attn_implementation(side.attention)
    # Train the embedding of [PAD], as the reference does: masking may replace a token by [PAD], drawn at random.
    model.bert.embeddings.word_embeddings.padding_idx = None
    lamb = ReferenceLamb(model, optimizer)
    steps = [_backward(side, model, batch) | {"gradient_norm": lamb.step()} for batch in batches]
    return Trained(steps, {name: weight.detach().double() for name, weight in model.named_parameters()})


def _backward(side: Side, model: Any, batch: Samples) -> dict[str, float]:
    """Compute the gradients of both mean losses of a global batch. Returns the losses."""
    order = np.arange(len(batch))[:: -1 if side.reverse else 1]
    losses = {"masked_lm_loss": 0.0, "next_sentence_loss": 0.0}
    for rows in np.array_split(order, side.micro_batches):
        samples = batch.take(rows)
        inputs = padded(samples, int(samples.lengths.max()))
        encoded = model.bert(
            inputs["input_ids"], attention_mask=inputs["attention_mask"], token_type_ids=inputs["token_type_ids"]
        )
        masked = inputs["labels"] >= 0
        # Apply the head only to masked tokens: other tokens' logits would be most of the work and have no gradient.
        logits = model.cls.predictions(encoded.last_hidden_state[masked])
        # Divide by the counts of the whole batch, so that the micro-batches' losses add up to the batch's mean.
        masked_lm = F.cross_entropy(logits, inputs["labels"][masked], reduction="sum") / len(batch.masked_lm_ids)
        logits = model.cls.seq_relationship(encoded.pooler_output)
        next_sentence = F.cross_entropy(logits, inputs["next_sentence_label"], reduction="sum") / len(batch)
        (masked_lm + next_sentence).backward()
        losses["masked_lm_loss"] += masked_lm.item()
        losses["next_sentence_loss"] += next_sentence.item()
    return losses


class ReferenceLamb:
    """LAMB as the reference defines it."""

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        self._parameters = dict(model.named_parameters())
        self._momenta = {name: torch.zeros_like(weight) for name, weight in self._parameters.items()}
        self._variances = {name: torch.zeros_like(weight) for name, weight in self._parameters.items()}
        self._config = config
        self._steps = 0

    @torch.no_grad()
    def step(self) -> float:
        """Apply the gradients and clear them. Returns their global norm before clipping."""
        # hypot adds the squared norms in fp64 without overflow.
        global_norm = math.hypot(*(_norm(_gradient(weight)) for weight in self._parameters.values()))
        # The maximum makes the scale 1 if the norm is within the limit.
        scale = self._config.max_grad_norm / max(global_norm, self._config.max_grad_norm)
        # Compute the rate before counting the step, because the schedule starts with step 0.
        rate = self._learning_rate()
        self._steps += 1
        for name, weight in self._parameters.items():
            update = self._direction(name, _gradient(weight) * scale)
            # The reference excludes parameters by name.
            if not any(part in name for part in ("LayerNorm", "layer_norm", "bias")):
                # Add the decay now, because it is part of the update whose norm is taken.
                update += self._config.weight_decay_rate * weight
                weight_norm, update_norm = _norm(weight), _norm(update)
                if weight_norm > 0 and update_norm > 0:
                    update *= weight_norm / update_norm
            weight -= rate * update
            weight.grad = None
        return global_norm

    def _direction(self, name: str, gradient: Tensor) -> Tensor:
        beta_1, beta_2 = self._config.beta_1, self._config.beta_2
        momentum, variance = self._momenta[name], self._variances[name]
        # In this form, the weights of the old and of the new value add up to exactly 1, despite rounding.
        momentum += (1 - beta_1) * (gradient - momentum)
        variance += (1 - beta_2) * (gradient * gradient - variance)
        unbiased_momentum = momentum / (1 - beta_1**self._steps)
        unbiased_variance = variance / (1 - beta_2**self._steps)
        return unbiased_momentum / (unbiased_variance.sqrt() + self._config.epsilon)

    def _learning_rate(self) -> float:
        """Return the next step's learning rate: warm-up, then linear decay to 0, counted from step 0."""
        config = self._config
        # If start_warmup_step is -1, the first step's rate is above 0.
        warmed_up = self._steps - config.start_warmup_step
        if warmed_up < config.num_warmup_steps:
            return config.base_learning_rate * warmed_up / config.num_warmup_steps
        progress = min(self._steps, config.learning_rate_training_steps) / config.learning_rate_training_steps
        return config.base_learning_rate * (1 - progress)


def _gradient(weight: nn.Parameter) -> Tensor:
    assert weight.grad is not None
    return weight.grad


def _norm(x: Tensor) -> float:
    return x.double().norm().item()
