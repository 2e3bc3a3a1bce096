"""Launches of a training step: every kernel that a GPU would run for the real model, traced without one.

The step is ``TrainingStep`` itself, forward, backward and update, on fake tensors of the shapes that a micro-batch of
Wikipedia's lengths has: what a change of the model or of a kernel launches is in the list by itself.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from dataclasses import dataclass, replace
from typing import Literal, TypeVar
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.module_tracker import ModuleTracker

import bert.step_parts
from bert.configuration.recipes import RECIPES
from bert.configuration.sections import ModelConfig
from bert.model import BertForPreTraining
from bert.parallel.mesh import Mesh
from bert.step import TrainingStep
from bert.timing.stopwatch import Stopwatch
from cluster.model.work import wikipedia_work
from dataloading.batches.loader import Batch, inert_batch
from dataloading.batches.shape_buckets import ShapeBucket
from kernels.tracing import KernelLaunch, traced

Part = Literal["encoder products", "attention", "element-wise", "weights and gradients", "ends", "update"]
"""Of a step: of all layers but the last their matrix products, attention, passes over tokens, and passes over parameters;
embeddings, last layer and heads; the optimizer, with the casts of weights that follow it."""

StepPrecision = Literal["bf16", "fp8"]
"""Of the encoder's products."""

TILE = 64
"""Queries, and keys, of a block of scores."""

ATTENTION_PRODUCTS = {"attention_forward": 2, "attention_backward_queries": 3, "attention_backward_keys": 4}
"""Products of scores by head size; the backward passes compute scores again, each for itself."""


_Lengths = TypeVar("_Lengths", int, NDArray[np.int64])


@dataclass(frozen=True)
class StepLaunch:
    """Launch with its place in the step.

    Attributes:
        layer: of the encoder, but for the last, which is among the ends.
        tiles: of attention, blocks of ``TILE`` x ``TILE`` scores over all heads, the last ones of a sequence in full.
    """

    launch: KernelLaunch
    part: Part
    layer: int | None
    tiles: int = 0

    @property
    def bytes(self) -> int:
        """Read and written."""
        return self.launch.read + self.launch.written


# Tracing a step of BERT-Large takes seconds.
@functools.cache
def step_launches(
    precision: StepPrecision, sequences: int, multiprocessors: int, model: ModelConfig | None = None
) -> tuple[StepLaunch, ...]:
    """Trace a step of one micro-batch of so many sequences of Wikipedia's lengths, in the order of launches.

    Raises:
        ValueError: Triton is not installed.
    """
    # Said here in one line: without Triton an import deep inside would fail.
    if importlib.util.find_spec("triton") is None:
        raise ValueError("triton is not installed: a step cannot be traced without it")
    model = model or ModelConfig()
    work = wikipedia_work(model)
    sizes, longest = work.typical(sequences), model.max_position_embeddings
    tokens, masked, pairs, last_pairs = (
        float(each.item()) for each in (sizes.tokens_AR, sizes.masked_AR, sizes.pairs_AR, sizes.last_pairs_AR)
    )
    shape_bucket = ShapeBucket.around(round(tokens), sequences, round(masked), longest)
    lengths, marked = work.lengths.astype(np.int64), work.masked_counts.astype(np.int64)
    # Share of dropout's kept bits that real lengths touch: rows of bits are laid out for the longest sequence.
    drawn = sequences * float((lengths * _blocks(lengths)).mean()) / (_blocks(longest) * shape_bucket.tokens)
    # Blocks of a sequence, last ones in full: the kernels compute whole blocks, masked or not.
    tiles, last_tiles = (sequences * float((_blocks(q) * _blocks(lengths)).mean()) for q in (lengths, 1 + marked))
    found: list[StepLaunch] = []
    stopwatch = Stopwatch()
    # Fake tensors follow autocast, autograd and shapes without memory or arithmetic.
    with FakeTensorMode() as fake:
        step, batch = _step(model, precision, stopwatch), _fake(inert_batch(shape_bucket), fake)
        # It knows which module is being computed, also in backward.
        with ModuleTracker() as modules:

            def observe(launch: KernelLaunch) -> None:
                blocks = 0.0
                if launch.kernel in ATTENTION_PRODUCTS:
                    # The last layer is told by its queries: it has those of masked tokens and [CLS] alone.
                    queries, heads, size = launch.shapes["query"]
                    is_last = queries != shape_bucket.tokens
                    scores = heads * size * (last_pairs if is_last else pairs)
                    # A kernel's shapes say nothing of sequences: the squares of their lengths do.
                    launch = replace(launch, multiply_adds=round(ATTENTION_PRODUCTS[launch.kernel] * scores))
                    blocks = heads * (last_tiles if is_last else tiles)
                layer = _layer(modules.parents)
                # The stopwatch of training knows the phase; LAMB's launches are in no module.
                part = "update" if stopwatch.tracker.phase == "update" else _part(launch, layer, shape_bucket.tokens)
                found.append(StepLaunch(launch, part, layer, round(blocks)))

            # The first micro-batch of a step may find gradients to write over; the last one adds to them as most do.
            step.model.register_forward_pre_hook(lambda *_: found.clear())
            with traced(observe, multiprocessors, {"kept": drawn}):
                step([batch, batch])
    return tuple(found)


def _blocks(lengths: _Lengths) -> _Lengths:
    return -(-lengths // TILE)


def _step(model: ModelConfig, precision: StepPrecision, stopwatch: Stopwatch) -> TrainingStep:
    recipe = RECIPES["h100_1x1"]()
    training = replace(recipe.training, precision=precision, gradient_accumulation_steps=1)
    config = replace(recipe, model=model, training=training, log=replace(recipe.log, division="open"))
    # Of fake tensors the only device that has autocast and gradients everywhere. Its autocast leaves the heads' norm in 16
    # bits, which a GPU casts up: a thousandth of the traffic.
    mesh = Mesh(0, 1, 0, torch.device("cpu"))
    # What a step does on a GPU alone.
    accumulates = patch.object(bert.step_parts, "accumulates_products", lambda _, chosen: chosen != "fp32")
    with accumulates:
        return TrainingStep(BertForPreTraining(model).train(), config, mesh, stopwatch)


def _fake(batch: Batch, mode: FakeTensorMode) -> Batch:
    tensors = {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}
    return replace(batch, **{name: mode.from_tensor(value) for name, value in tensors.items()})


def _layer(modules: set[str]) -> int | None:
    """Return the encoder layer that is being computed, forward or backward; the last one is not run as a module."""
    found = {int(match[1]) for name in modules if (match := re.search(r"\.layers\.(\d+)", name))}
    return max(found, default=None)


def _part(launch: KernelLaunch, layer: int | None, tokens: int) -> Part:
    if layer is None:
        return "ends"
    if launch.kernel.startswith("attention"):
        return "attention"
    if launch.multiply_adds:
        return "encoder products"
    # A launch is a pass over tokens if any of its tensors has as many rows; passes over parameters have none.
    of_tokens = any(tokens in shape for shape in launch.shapes.values())
    return "element-wise" if of_tokens else "weights and gradients"
