"""Fill the gaps in a text with a checkpoint's predictions: ``python -m bert.fill_mask CHECKPOINT "a text with [MASK]"``."""

import sys
from pathlib import Path
from typing import Annotated

import tyro

from console.commands import run_program
from console.program import say
from dataloading.options import AS_STATED, NormalizationOptions

MASK = "[MASK]"


def fill_mask(
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
        vocab: The model's vocabulary, a file or a model's folder. By default, the files beside the checkpoint.
        top: Number of words to print for each gap.
        normalization: Settings that replace what is known about the normalization.
    """
    if top < 1:
        raise ValueError(f"--top is {top}: expected at least 1")
    if MASK not in text:
        raise ValueError(f"the text has no gap: write {MASK} in place of a word")
    gaps = GapFiller(checkpoint, vocab, normalization)(text, top)
    filled, *rest = text.split(MASK)
    for number, (words, piece) in enumerate(zip(gaps, rest, strict=True), 1):
        say(f"gap {number}: {', '.join(f'{word} {100 * share:.1f} %' for word, share in words)}")
        filled += words[0][0] + piece
    say(filled)


class GapFiller:
    """Filler of gaps in texts by a checkpoint. Prints how texts are normalized.

    Raises ``ValueError`` if the checkpoint is not a BERT with a masked-LM head.
    """

    def __init__(self, checkpoint: Path, vocab: Path | None, normalization: NormalizationOptions = AS_STATED) -> None:
        import torch

        from bert.checkpoints.sources import open_source
        from bert.checkpoints.tokenizer import tokenizer_of
        from bert.model import BertForPreTraining
        from dataloading.text.tokenization import Tokenizer

        self.source = source = open_source(checkpoint, whole=False)
        self.vocabulary, self.normalization = tokenizer_of(source, checkpoint, vocab, normalization)
        self._tokenizer = Tokenizer(self.vocabulary, self.normalization)
        if missing := [name for name in ("transform.weight", "decoder_bias") if name not in source.weights]:
            raise ValueError(
                f"{checkpoint} has no masked-LM head ({', '.join(missing)}): choose a checkpoint that has one"
            )
        self._model = BertForPreTraining(source.model).eval()
        state = self._model.state_dict()
        with torch.inference_mode():
            for name, weight in source.weights.items():
                state[name].copy_(weight.read())

    def __call__(self, text: str, top: int) -> list[list[tuple[str, float]]]:
        """Return the ``top`` most probable words for each gap with their probabilities.

        Raises ``ValueError`` if the text is too long.
        """
        import numpy as np
        import torch

        from dataloading.batches.loader import batch_of
        from dataloading.shards.samples import SampleBuilder

        vocabulary, most = self.vocabulary, self._model.config.max_position_embeddings
        pieces, offsets = self._tokenizer.encode_lines(text.split(MASK))
        cls_id, sep_id, mask_id = (vocabulary.ids[token] for token in ("[CLS]", "[SEP]", "[MASK]"))
        ids = np.concatenate([[cls_id], np.insert(pieces, offsets[1:-1], mask_id), [sep_id]])
        if len(ids) > most:
            raise ValueError(f"the text has {len(ids)} tokens, but the model has {most} positions: shorten the text")
        # The position of a gap is shifted by one for [CLS], and by one for each earlier gap.
        gaps = offsets[1:-1] + np.arange(1, len(offsets) - 1)
        builder = SampleBuilder()
        parts = (ids.astype("<u2"), np.zeros(len(ids), "u1"), gaps.astype("<u2"), np.zeros(len(gaps), "<u2"))
        builder.add(*(part.data.cast("B") for part in parts), next_sentence_label=0)
        with torch.inference_mode():
            _, masked_MD = self._model.head_inputs(batch_of(builder.samples()))
            # Drop rows beyond the vocabulary, which are padding of the word embedding table.
            shares = self._model.masked_lm_logits(masked_MD)[:, : vocabulary.size].softmax(-1)
            best = shares.topk(min(top, vocabulary.size))
        rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [[(vocabulary.tokens[index], share) for index, share in zip(*row, strict=True)] for row in rows]


if __name__ == "__main__":
    sys.exit(run_program(fill_mask, "python -m bert.fill_mask"))
