"""Phase 1 of the built-in default: the vocabulary and the checkpoint that ``tiny_cpu`` starts from.

    python -m bert.phase1 --out bert/artifacts/tiny_cpu

The benchmark starts from a checkpoint that was trained on short sequences; so does the default. Phase 1 sees 64 tokens at
once, the timed phase 128. A small BERT needs hours to find out by itself that neighbouring tokens matter, so phase 1 starts
from positions and first-layer heads that already look one and two tokens to either side. All of it is training code of
this artefact only; the timed run knows nothing of it.
"""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from bert.configuration.recipes import tiny_model
from bert.train import refused
from console.program import accept_any_text, answer_version, parsed, say

if TYPE_CHECKING:
    from torch import Tensor

    from bert.model import BertForPreTraining
    from dataloading.shards.samples import Samples


@dataclass(frozen=True)
class Phase1:
    """Settings of phase 1; the defaults made the shipped artefact."""

    out: Path
    """Folder for vocab.txt and phase1.safetensors."""
    steps: int = 1500
    batch_size: int = 16
    learning_rate: float = 1.5e-3
    warmup_steps: int = 100
    max_seq_length: int = 64
    seed: int = 0


def main(settings: Phase1) -> None:
    """Learn the vocabulary, train, write both."""
    import torch

    # Imported here, as PyTorch is: --help need not wait for seconds of imports.
    from bert.checkpoints.weights import VOCABULARY, save_weights
    from bert.model import BertForPreTraining
    from dataloading.preparation.demo import TRAIN_OPTIONS, demo_samples, text_digest
    from dataloading.text.documents import demo_documents
    from dataloading.text.tokenization import Tokenizer, Vocabulary
    from dataloading.text.vocabulary import learn_vocabulary

    torch.manual_seed(settings.seed)
    torch.set_num_threads(1)  # so that the same machine gives the same bits
    documents = [document for document in demo_documents() if not document.held_out]
    settings.out.mkdir(parents=True, exist_ok=True)
    vocab = settings.out / "vocab.txt"
    tokens = learn_vocabulary([line for document in documents for line in document.sentences], tiny_model().vocab_size)
    vocabulary = Vocabulary.of_tokens(tokens, vocab)
    vocab.write_bytes(vocabulary.content)
    options = replace(
        TRAIN_OPTIONS,
        max_seq_length=settings.max_seq_length,
        # BERT masks 15 % of the tokens.
        max_predictions_per_seq=round(0.15 * settings.max_seq_length),
        dupe_factor=5,
    )
    samples = demo_samples(documents, Tokenizer(vocabulary), options)
    model = _informed_start(BertForPreTraining(replace(tiny_model(), initializer_range=0.05)), settings.seed)
    _train(model, samples, settings)
    provenance = {
        "made_by": "python -m bert.phase1",
        "python": platform.python_version(),
        "text_sha256": text_digest(documents),
        # The folder is a path, which is no JSON, and says nothing about the weights.
        **{name: value for name, value in asdict(settings).items() if name != "out"},
    }
    metadata = {"provenance": json.dumps(provenance), VOCABULARY: vocabulary.sha256}
    save_weights(model, settings.out / "phase1.safetensors", metadata)


def _train(model: BertForPreTraining, samples: Samples, settings: Phase1) -> None:
    import torch

    from bert.optimizer import FlatParameters
    from dataloading.batches.loader import batch_of
    from dataloading.batches.sampler import BatchPlan

    flat = FlatParameters.of(model)
    # One tensor for AdamW: the vector that all parameters are views of, with the gradient that theirs are views of.
    weights_P = flat.weights_P.requires_grad_()
    weights_P.grad = flat.gradients_P
    optimizer = torch.optim.AdamW([weights_P], lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / settings.warmup_steps) * (1 - step / settings.steps)
    )
    plan = BatchPlan(samples.lengths, samples.masked_counts, settings.batch_size, 1, 1, settings.seed)
    for step in range(settings.steps):
        (micro_batch,) = plan.rank_batches(step, rank=0)
        batch = batch_of(samples.take(micro_batch.indices), micro_batch)
        masked_lm_loss, next_sentence_loss = model(batch).mean_losses(batch)
        (masked_lm_loss + next_sentence_loss).backward()
        torch.nn.utils.clip_grad_norm_([weights_P], 1.0)
        optimizer.step()
        schedule.step()
        # Not optimizer.zero_grad(): that would drop weights_P.grad, and leave the parameters' gradients as they are.
        flat.gradients_P.zero_()
        if (step + 1) % 200 == 0:
            say(f"step {step + 1}/{settings.steps}  masked-LM loss {float(masked_lm_loss.detach()):.3f}")


def _informed_start(model: BertForPreTraining, seed: int) -> BertForPreTraining:
    """Random weights, but positions are sinusoids and the first layer's heads attend to the offsets -1, +1, -2, +2.

    With position i as (sin fi, cos fi) for frequencies f, rotating the query by an offset o makes query i and key j score
    the sum of cos(f(i + o - j)), which is largest at j = i + o.
    """
    import torch

    from bert.layers import EncoderLayer
    from bert.model import initialize_

    initialize_(model, torch.Generator().manual_seed(seed))
    config = model.config
    # Radians a token: periods from about two tokens to more than the 128 positions of the model.
    frequencies = torch.logspace(
        torch.log10(torch.tensor(3.0)), torch.log10(torch.tensor(0.03)), config.hidden_size // 2
    )
    angles = torch.arange(config.max_position_embeddings)[:, None] * frequencies
    positions = torch.cat([angles.sin(), angles.cos()], dim=1)
    with torch.no_grad():
        # As wide as the random embeddings that they are added to.
        model.embeddings.position.copy_(positions / positions.std() * config.initializer_range)
        first = model.layers[0]
        assert isinstance(first, EncoderLayer)
        query, key, _ = first.query_key_value.weight.chunk(3)
        head_size = config.hidden_size // config.num_attention_heads
        # One for each of the four heads of ``tiny_model``.
        for head, offset in enumerate((-1, 1, -2, 2)):
            rows = slice(head * head_size, (head + 1) * head_size)
            _add_rotation(query[rows], frequencies, offset)
            _add_rotation(key[rows], frequencies, 0)
    return model


_STRENGTH = 1.4
"""Of an informed start beside the random weights."""


def _add_rotation(weight_ED: Tensor, frequencies: Tensor, offset: int) -> None:
    """Make pairs of rows read the sine and cosine of a spread of frequencies, shifted by ``offset`` positions."""
    pairs, half = len(weight_ED) // 2, len(frequencies)
    for pair in range(pairs):
        column = pair * half // pairs
        sine, cosine = (frequencies[column] * offset).sin(), (frequencies[column] * offset).cos()
        weight_ED[2 * pair, column] += _STRENGTH * cosine
        weight_ED[2 * pair, column + half] += _STRENGTH * sine
        weight_ED[2 * pair + 1, column + half] += _STRENGTH * cosine
        weight_ED[2 * pair + 1, column] -= _STRENGTH * sine


if __name__ == "__main__":
    accept_any_text()
    answer_version(sys.argv[1:])
    try:
        main(parsed(partial(tyro.cli, Phase1, prog="python -m bert.phase1")))
    except (ValueError, OSError) as error:
        sys.exit(refused(error))
