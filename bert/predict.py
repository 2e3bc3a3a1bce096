"""Fill the gaps in a text with a checkpoint's predictions: ``python -m bert.predict CHECKPOINT "a text with [MASK]"``."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import tyro

from bert.train import run_command
from console.program import say
from dataloading.options import AS_STATED, NormalizationOptions

MASK = "[MASK]"


def predict(
    checkpoint: tyro.conf.Positional[Path],
    text: tyro.conf.Positional[str],
    vocab: Path | None = None,
    top: int = 5,
    normalization: Annotated[NormalizationOptions, tyro.conf.arg(name="")] = AS_STATED,
) -> None:
    """Print the most probable words for each gap in a text, and the text with the best words filled in.

    Args:
        checkpoint: A safetensors file, a Hugging Face folder, or the prefix of a TensorFlow checkpoint.
        text: The text, with [MASK] for each gap.
        vocab: The model's vocabulary, a file or a model's folder. By default the files beside the checkpoint.
        top: Number of words to print for each gap.
        normalization: Settings that replace what is known about the normalization.
    """
    if top < 1:
        raise ValueError(f"--top is {top}: expected at least 1")
    if MASK not in text:
        raise ValueError(f"the text has no gap: write {MASK} in place of a word")
    gaps = fill(checkpoint, text, vocab, top, normalization)
    filled, *rest = text.split(MASK)
    for number, (words, piece) in enumerate(zip(gaps, rest, strict=True), 1):
        say(f"gap {number}: {', '.join(f'{word} {100 * share:.1f} %' for word, share in words)}")
        filled += words[0][0] + piece
    say(filled)


def fill(
    checkpoint: Path, text: str, vocab: Path | None, top: int, normalization: NormalizationOptions = AS_STATED
) -> list[list[tuple[str, float]]]:
    """Print how the text is normalized, and return the ``top`` most probable words for each gap with their probabilities.

    Raises ``ValueError`` if the checkpoint is not a BERT with a masked-LM head, or if the text is too long.
    """
    import numpy as np
    import torch

    from bert.checkpoints.sources import open_source
    from bert.checkpoints.tokenizer import tokenizer_of
    from bert.model import BertForPreTraining
    from dataloading.batches.loader import batch_of
    from dataloading.shards.samples import SampleBuilder
    from dataloading.text.tokenization import Tokenizer

    source = open_source(checkpoint, whole=False)
    vocabulary, found = tokenizer_of(source, checkpoint, vocab, normalization)
    weights = source.weights
    if missing := [name for name in ("transform.weight", "decoder_bias") if name not in weights]:
        raise ValueError(f"{checkpoint} has no masked-LM head ({', '.join(missing)}): it cannot fill gaps")
    pieces, offsets = Tokenizer(vocabulary, **asdict(found)).encode_lines(text.split(MASK))
    cls_id, sep_id, mask_id = (vocabulary.ids[token] for token in ("[CLS]", "[SEP]", "[MASK]"))
    ids = np.concatenate([[cls_id], np.insert(pieces, offsets[1:-1], mask_id), [sep_id]])
    if len(ids) > source.model.max_position_embeddings:
        raise ValueError(f"the text has {len(ids)} tokens, the model {source.model.max_position_embeddings} positions")
    gaps = offsets[1:-1] + np.arange(1, len(offsets) - 1)  # shifted by [CLS] and by the earlier gaps
    builder = SampleBuilder()
    parts = (ids.astype("<u2"), np.zeros(len(ids), "u1"), gaps.astype("<u2"), np.zeros(len(gaps), "<u2"))
    builder.add(*(part.data.cast("B") for part in parts), next_sentence_label=0)
    model = BertForPreTraining(source.model).eval()
    state = model.state_dict()
    with torch.inference_mode():
        for name, weight in weights.items():
            state[name].copy_(weight.read())
        _, masked_MD = model.head_inputs(batch_of(builder.samples()))
        # Rows beyond the vocabulary are padding of the word embedding table.
        shares = model.masked_lm_logits(masked_MD)[:, : vocabulary.size].softmax(-1)
        best = shares.topk(min(top, vocabulary.size))
    rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [[(vocabulary.tokens[index], share) for index, share in zip(*row, strict=True)] for row in rows]


if __name__ == "__main__":
    sys.exit(run_command(predict, "bert.predict"))
