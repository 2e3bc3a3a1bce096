"""Error of a gradient summed over up to 4,096 ranks, by the type in which it travels and the order in which it is added.

    python benchmarks/training/reduction_error.py [--model large] [--vocab FILE --text FILE ...] [--ranks N ...] [--out FILE]

Contributions of ranks are drawn from real gradients of some micro-batches, divided by the counts of a global batch as in
training, for some elements of each tensor (wild bootstrap): to an element's mean over the micro-batches comes how far one of
them, drawn for each rank, is from it, times a number from the standard normal distribution. So means and variances are those
of the gradients, and no two ranks round alike. This is done with the means and once more without: ranks that agree, where
partial sums grow the most against what is added to them, and ranks that have nothing in common, where the errors of what is
sent average out the least. Between them lies any run. The sums in every order are held against the sum in fp64; a tensor's
error is the norm of the difference over the norm of the sum, its cosine that of the angle between both.

``small`` is the built-in default with the checkpoint that it starts from, ``large`` BERT-Large with random weights, which
needs 4 GB and some minutes. Without --text the input is the standard library's prose, without --vocab the vocabulary that
ships with the built-in default.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import tyro
from torch import Tensor

from benchmarks.conditions import write_figures
from bert.checkpoints.weights import load_weights
from bert.configuration.recipes import tiny_cpu, tiny_model
from bert.configuration.sections import ModelConfig
from bert.model import BertForPreTraining, initialize_
from bert.parallel.reduction.sums import add_contributions
from dataloading.batches.loader import batch_of
from dataloading.batches.sampler import MicroBatch
from dataloading.options import PretrainingOptions
from dataloading.preparation.pretraining_data import create_samples, read_documents, tokenize_documents
from dataloading.shards.samples import Samples
from dataloading.text.documents import demo_documents
from dataloading.text.tokenization import Tokenizer

LOCAL_SIZE = 8
"""Ranks a node in the hierarchical orders."""
MAX_LENGTH = 128
"""Tokens of a sequence, for the sake of memory."""


@dataclass(frozen=True)
class Settings:
    """Settings: what is summed."""

    model: Literal["small", "large"] = "small"
    vocab: Path = tiny_cpu().data.vocab
    """One token a line."""
    text: tuple[Path, ...] = ()
    """Files with one sentence a line and an empty line between documents."""
    ranks: tuple[int, ...] = (8, 64, 512, 4096)
    micro_batches: int = 8
    """From which contributions are drawn."""
    sequences: int = 4
    """Of a micro-batch."""
    elements: int = 1024
    """Drawn from each tensor, if it has more."""
    out: Path | None = None
    """Write the figures here as JSON."""

    def __post_init__(self) -> None:
        for ranks in self.ranks:
            # A tree of pairs, and nodes of eight, need powers of two.
            if ranks < LOCAL_SIZE or ranks & (ranks - 1):
                raise ValueError(f"--ranks {ranks}: expected powers of two from {LOCAL_SIZE}")


@dataclass(frozen=True)
class Figures:
    """Figures of the tensors' sums in one order, over one number of ranks. Errors are relative, in norm."""

    median_error: float
    worst_error: float
    worst_tensor: str
    lowest_cosine: float
    flushed: float
    """Share of the contributions' elements that became 0, of those that are not."""


def ring(contributions_RW: Tensor) -> Tensor:
    """Add one after another, every partial sum rounded to the contributions' type, [W] or [..., W] of [R, ..., W]."""
    # Cloned: `+=` below would change the first rank's contribution.
    partial = contributions_RW[0].clone()
    for contribution in contributions_RW[1:]:
        # In the contributions' type: PyTorch rounds each sum to it, as a collective does at every hop.
        partial += contribution
    return partial


def tree(contributions_RW: Tensor) -> Tensor:
    """Recursive doubling: neighbours, then neighbouring pairs and so on, rounding every partial sum."""
    while len(contributions_RW) > 1:
        # Even and odd ranks: neighbours first.
        contributions_RW = contributions_RW[0::2] + contributions_RW[1::2]
    return contributions_RW[0]


def rings_of_nodes(contributions_RW: Tensor) -> Tensor:
    """A ring in each node, then one over the nodes."""
    # Ranks of all nodes with the same place are added in one go.
    return ring(ring(contributions_RW.unflatten(0, (-1, LOCAL_SIZE)).transpose(0, 1)))


def once(contributions_RW: Tensor) -> Tensor:
    """Add as ``sharded_world`` does with ``reduce_dtype`` bf16: the sum stays fp32 where it is made."""
    sum_W = torch.empty(contributions_RW.shape[1:])
    add_contributions(contributions_RW, sum_W)
    return sum_W


def flat(contributions_RW: Tensor) -> Tensor:
    """Add as ``flat`` does: the sum is rounded for being gathered."""
    return once(contributions_RW).to(contributions_RW.dtype)


def hierarchical(contributions_RW: Tensor) -> Tensor:
    """Add as ``hierarchical`` and ``sharded`` do: sums of nodes are rounded for the rails, their sum for being gathered."""
    nodes = [flat(node) for node in contributions_RW.split(LOCAL_SIZE)]
    return flat(torch.stack(nodes)) if len(nodes) > 1 else nodes[0]


@dataclass(frozen=True)
class Order:
    """The way in which contributions travel and are added."""

    dtype: torch.dtype
    add: Callable[[Tensor], Tensor]
    scaled: bool = False
    """Multiplied by one power of two for all tensors, the largest with which no sum can overflow."""


ORDERS = {
    "fp32, ring": Order(torch.float32, ring),
    "fp32, tree": Order(torch.float32, tree),
    "bf16, ring": Order(torch.bfloat16, ring),
    "bf16, ring in the node, ring of nodes": Order(torch.bfloat16, rings_of_nodes),
    "bf16, tree": Order(torch.bfloat16, tree),
    "bf16, fp32 sums, sharded_world": Order(torch.bfloat16, once),
    "bf16, fp32 sums, flat": Order(torch.bfloat16, flat),
    "bf16, fp32 sums, hierarchical and sharded": Order(torch.bfloat16, hierarchical),
    "fp16, fp32 sums, unscaled": Order(torch.float16, flat),
    "fp16, fp32 sums, one power of two": Order(torch.float16, flat, scaled=True),
}


def main(settings: Settings) -> None:
    """Print a table for each number of ranks."""
    gradients = sampled_gradients(settings)
    figures = {}
    for ranks in settings.ranks:
        for agreement in ("agree", "differ"):
            found = measure(gradients, ranks, means=agreement == "agree")
            figures[f"{ranks} ranks that {agreement}"] = found
            title = f"{ranks} ranks that {agreement}: errors of tensors"
            print(f"{title:<44}{'median':>10}{'worst':>11}{'lowest cosine':>15}{'become 0':>11}")
            print("\n".join(_line(name, figure) for name, figure in found.items()), flush=True)
    if settings.out:
        facts = {name: value for name, value in vars(settings).items() if name not in ("out", "vocab", "text")}
        texts = [path.name for path in settings.text] or ["standard library"]
        rows = {title: {name: vars(found) for name, found in orders.items()} for title, orders in figures.items()}
        write_figures(settings.out, facts | {"vocab": settings.vocab.name, "text": texts, "figures": rows})


def _line(name: str, figure: Figures) -> str:
    return (
        f"  {name:<42}{figure.median_error:>10.5%}{figure.worst_error:>11.5%}{figure.lowest_cosine:>15.6f}"
        f"{figure.flushed:>11.2%}  {figure.worst_tensor}"
    )


def sampled_gradients(settings: Settings) -> dict[str, Tensor]:
    """Elements of each tensor's gradient by micro-batch, fp32 [K, W], as on one rank that is alone."""
    tokenizer = Tokenizer.from_vocab(settings.vocab)
    model = _model(settings, tokenizer.vocabulary.size)
    samples = _samples(settings, tokenizer)
    whole = len(samples.masked_lm_ids)
    generator = torch.Generator().manual_seed(0)
    tensors = dict(_tensors(model))
    # Positions are drawn once: all micro-batches tell of the same elements.
    chosen = {
        name: torch.randperm(tensor.numel(), generator=generator)[: settings.elements].sort().values
        for name, tensor in tensors.items()
    }
    rows: dict[str, list[Tensor]] = {name: [] for name in tensors}
    for micro_batch in range(settings.micro_batches):
        model.zero_grad()
        # One sequence at a time, so that activations need little memory.
        for sequence in range(micro_batch * settings.sequences, (micro_batch + 1) * settings.sequences):
            one = samples.slice(sequence, sequence + 1)
            # The counts of a mean micro-batch.
            batch = batch_of(one, MicroBatch(np.arange(1), settings.sequences, round(whole / settings.micro_batches)))
            sum(model(batch).mean_losses(batch)).backward()  # type: ignore[union-attr]
        for name, gradient in _tensors(model, gradients=True):
            rows[name].append(gradient.flatten()[chosen[name]])
    return {name: torch.stack(found) for name, found in rows.items()}


def _model(settings: Settings, vocab_size: int) -> BertForPreTraining:
    recipe = tiny_cpu()
    if settings.model == "small":
        model = BertForPreTraining(replace(tiny_model(), vocab_size=vocab_size))
        assert recipe.data.initial_checkpoint is not None
        load_weights(model, recipe.data.initial_checkpoint)
    else:
        model = BertForPreTraining(ModelConfig(vocab_size=vocab_size))
        initialize_(model, torch.Generator().manual_seed(0))
    return model.train()


def _samples(settings: Settings, tokenizer: Tokenizer) -> Samples:
    """Create all samples that are needed, from everywhere in the text."""
    documents = (
        read_documents(settings.text) if settings.text else [document.sentences for document in demo_documents()]
    )
    options = PretrainingOptions(max_seq_length=MAX_LENGTH, dupe_factor=2)
    samples = create_samples(tokenize_documents(documents, tokenizer), options, tokenizer.vocabulary)
    count = settings.micro_batches * settings.sequences
    if len(samples) < count:
        raise ValueError(f"the text has {len(samples)} samples: expected at least {count}; give more of it by --text")
    return samples.take(np.linspace(0, len(samples) - 1, count).astype(np.int64))


def _tensors(model: BertForPreTraining, gradients: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors by name, as the optimizer sees them: weights of query, key and value are three."""
    for name, parameter in model.named_parameters():
        tensor = parameter.grad if gradients else parameter.detach()
        assert tensor is not None
        if "query_key_value.weight" in name:
            for part, third in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                yield name.replace("query_key_value", part), third
        else:
            yield name, tensor


def measure(
    gradients: Mapping[str, Tensor], ranks: int, means: bool, orders: Mapping[str, Order] = ORDERS
) -> dict[str, Figures]:
    """Sum the contributions of ``ranks`` ranks in every order, tensor by tensor, against fp64. Deterministic."""
    largest = max(float(tensor.abs().max()) for tensor in gradients.values())
    tallies = {name: _Tally() for name in orders}
    # A seed for each number of ranks: equal calls give equal tables.
    generator = torch.Generator().manual_seed(ranks)
    for tensor, gradients_KW in gradients.items():
        contributions_RW = contributions(gradients_KW, ranks, means, generator)
        exact_W = contributions_RW.double().sum(0)
        if not exact_W.any():  # positions and segments that the text does not reach
            continue
        for name, order in orders.items():
            # Rounded down to a power of two, which itself rounds nothing.
            scale = 2.0 ** np.floor(np.log2(torch.finfo(order.dtype).max / largest)) if order.scaled else 1.0
            sent_RW = (contributions_RW * scale).to(order.dtype)
            # The scale is taken off in fp64.
            tallies[name].add(tensor, contributions_RW, sent_RW, exact_W, order.add(sent_RW).double() / scale)
    return {name: tally.figures() for name, tally in tallies.items()}


class _Tally:
    """Tally of what one order did to the tensors so far."""

    def __init__(self) -> None:
        self._errors: dict[str, float] = {}
        self._cosines: list[float] = []
        self._flushed = self._elements = 0

    def add(self, tensor: str, contributions_RW: Tensor, sent_RW: Tensor, exact_W: Tensor, found_W: Tensor) -> None:
        self._flushed += int(((sent_RW == 0) & (contributions_RW != 0)).sum())
        self._elements += int((contributions_RW != 0).sum())
        self._errors[tensor] = float((found_W - exact_W).norm() / exact_W.norm())
        # Clamped, since a sum that became 0 has no direction.
        self._cosines.append(float(found_W @ exact_W / (found_W.norm() * exact_W.norm()).clamp(min=1e-300)))

    def figures(self) -> Figures:
        worst = max(self._errors, key=lambda tensor: self._errors[tensor])
        ordered = sorted(self._errors.values())
        median = ordered[len(ordered) // 2]
        return Figures(median, self._errors[worst], worst, min(self._cosines), self._flushed / self._elements)


def contributions(gradients_KW: Tensor, ranks: int, means: bool, generator: torch.Generator) -> Tensor:
    """Draw what ranks would contribute, fp32 [R, W], from gradients of micro-batches, with their means or without."""
    mean_W = gradients_KW.mean(0)
    drawn_R = torch.randint(len(gradients_KW), (ranks,), generator=generator)
    factors_RW = torch.randn(ranks, len(mean_W), generator=generator)
    # What differs from the mean, times a random factor: variances stay, and no two ranks are alike.
    around_RW = (gradients_KW - mean_W)[drawn_R] * factors_RW
    # As in training, losses have been divided by counts of the global batch.
    return (mean_W + around_RW if means else around_RW) / ranks


if __name__ == "__main__":
    try:
        main(tyro.cli(Settings, description=__doc__))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
