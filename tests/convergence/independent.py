"""Pretraining by other code than the program's: Hugging Face's BERT on padded batches, and LAMB tensor by tensor.

The benchmark's definition in its plainest form, which ``test_agreement.py`` compares with the program. It takes samples,
settings and initial weights from the program. LAMB, the schedule and what is excluded from decay and
adaptation follow the reference's ``lamb_optimizer_v1.py`` and ``optimization.py`` (MLPerf Training,
``retired_benchmarks/bert``): by name, one variable at a time. Norms are float64, whatever the weights are.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.training.hugging_face import model_with_weights_of, padded
from bert.configuration.sections import OptimizerConfig
from bert.model import BertForPreTraining
from dataloading.shards.samples import Samples

NOT_ADAPTED = ("LayerNorm", "layer_norm", "bias")


@dataclass(frozen=True)
class Side:
    """A side of a comparison: what the numbers are, and in which order they are added up."""

    name: str
    dtype: torch.dtype
    """Of weights, gradients and moments."""
    micro_batches: int = 1
    """Parts that a global batch is cut into; each is padded to its longest sample."""
    reverse: bool = False
    """Whether a global batch is taken from its end."""
    attention: Literal["sdpa", "eager"] = "sdpa"


@dataclass
class Trained:
    """Results of a run: a number a step, and the weights after the last one under Hugging Face's names, float64."""

    masked_lm_loss: list[float] = field(default_factory=list)
    next_sentence_loss: list[float] = field(default_factory=list)
    gradient_norm: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def train(side: Side, initial: BertForPreTraining, batches: Iterable[Samples], optimizer: OptimizerConfig) -> Trained:
    """Train from the weights of ``initial``, a step a global batch."""
    model: Any = model_with_weights_of(initial).to(side.dtype).train()
    model.set_attn_implementation(side.attention)
    # Hugging Face's embedding leaves [PAD] untrained; the reference's does not, and [PAD] is among the tokens that masking
    # draws at random.
    model.bert.embeddings.word_embeddings.padding_idx = None
    lamb, trained = ReferenceLamb(model, optimizer), Trained()
    for batch in batches:
        masked_lm_loss, next_sentence_loss = _backward(side, model, batch)
        trained.masked_lm_loss.append(masked_lm_loss)
        trained.next_sentence_loss.append(next_sentence_loss)
        trained.gradient_norm.append(lamb.step())
    trained.weights = {name: weight.detach().double() for name, weight in model.named_parameters()}
    return trained


def _backward(side: Side, model: Any, batch: Samples) -> tuple[float, float]:
    """Gradients of both mean losses of a global batch, and the losses."""
    order = np.arange(len(batch))[:: -1 if side.reverse else 1]
    masked_lm_loss = next_sentence_loss = 0.0
    for rows in np.array_split(order, side.micro_batches):
        samples = batch.take(rows)
        inputs = padded(samples, int(samples.lengths.max()))
        encoded = model.bert(
            inputs["input_ids"], attention_mask=inputs["attention_mask"], token_type_ids=inputs["token_type_ids"]
        )
        masked = inputs["labels"] >= 0
        # The head at masked tokens alone, since logits of all tokens would be most of the work, and have no gradient.
        logits = model.cls.predictions(encoded.last_hidden_state[masked])
        # Divided by the counts of the whole batch, so that parts add up to the batch's mean.
        masked_lm = F.cross_entropy(logits, inputs["labels"][masked], reduction="sum") / len(batch.masked_lm_ids)
        logits = model.cls.seq_relationship(encoded.pooler_output)
        next_sentence = F.cross_entropy(logits, inputs["next_sentence_label"], reduction="sum") / len(batch)
        (masked_lm + next_sentence).backward()
        masked_lm_loss += masked_lm.item()
        next_sentence_loss += next_sentence.item()
    return masked_lm_loss, next_sentence_loss


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
        """Apply the gradients and forget them; returns their global norm before clipping."""
        # hypot adds squares of norms without overflow, in fp64.
        global_norm = math.hypot(*(_norm(_gradient(weight)) for weight in self._parameters.values()))
        # max before dividing: a gradient within the limit keeps its length.
        scale = self._config.max_grad_norm / max(global_norm, self._config.max_grad_norm)
        # Before the step is counted: the schedule's first step is 0.
        rate = self._learning_rate()
        self._steps += 1
        for name, weight in self._parameters.items():
            update = self._direction(name, _gradient(weight) * scale)
            # By name, as the reference excludes them.
            if not any(part in name for part in NOT_ADAPTED):
                # Decay comes before the norm of the update, which it is part of.
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
        # In this form the weights of old and new add up to 1 in any precision.
        momentum += (1 - beta_1) * (gradient - momentum)
        variance += (1 - beta_2) * (gradient * gradient - variance)
        unbiased_momentum = momentum / (1 - beta_1**self._steps)
        unbiased_variance = variance / (1 - beta_2**self._steps)
        return unbiased_momentum / (unbiased_variance.sqrt() + self._config.epsilon)

    def _learning_rate(self) -> float:
        """Learning rate of the step to come: warm-up, then polynomial decay of power 1 to 0 on the absolute step."""
        config = self._config
        # With start_warmup_step -1 the first step's rate is not 0.
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
