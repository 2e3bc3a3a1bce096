"""Export of a model trained on the user's text: a Hugging Face folder with a model card, and lines about its quality."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from bert.checkpoints.hugging_face import write_folder
from bert.checkpoints.trained import stated_evaluation
from bert.fill_mask import MASK, GapFiller
from compliance.log.metrics import EvaluationRecord, read_metrics
from console.program import say
from console.text import counted
from dataloading.dataset.folder import Dataset, open_dataset
from dataloading.text.vocabulary import Vocabulary

_EXAMPLES = 3
_EXAMPLE_CHARACTERS = 70
_FEWEST_WORDS = 5
_NAMED_FILES = 5
"""If there are at least this many text files, the model card states their number instead of their names."""
_READ_SAMPLES = 256
"""Number of held-out samples that are searched for examples."""

_CARD = """\
---
library_name: transformers
pipeline_tag: fill-mask
tags: [bert]
---
# BERT trained on own text

A BERT with {layers} of {width}, trained on {samples:,} samples from {files}.
Its license depends on the text: name it here.

| on held-out documents | |
|---|---|
| masked tokens filled in correctly | {accuracy:.1%} ± {error:.1%} of {count:,} |
| perplexity of masked tokens | {perplexity:.1f} |

Text is normalized to {normalization}. The model takes up to {positions} tokens.

```python
from transformers import pipeline

fill = pipeline("fill-mask", model="PATH OF THIS FOLDER")
print(fill("{example}"))
```
"""
"""README.md of the exported folder, which model hubs show as its model card."""


def export(trained: Path, data: Path, logs: Path, out: Path) -> None:
    """Write the Hugging Face folder ``out``, and print the model's quality, examples, and whether to train longer.

    ``trained`` is the file of weights. ``data`` is the folder of the data sets and the vocabulary. ``logs`` is the folder
    that contains the metrics of the training.
    """
    found, held_out, train = stated_evaluation(trained), open_dataset(data / "evaluation"), open_dataset(data / "train")
    if found is None:
        raise ValueError(f"{trained} does not record the evaluation of its weights: train again, to another --out")
    fill = GapFiller(trained, data / "vocab.txt")
    weights, vocabulary, normalization = fill.source.weights, fill.vocabulary, fill.normalization
    examples = list(examples_of(held_out, vocabulary))
    card = _card(fill, found, train.info.sources, examples[0][0] if examples else MASK)
    write_folder(out, fill.source.model, weights, vocabulary, normalization, {}, card)
    say(f"model in {out}")
    say(
        f"held-out text: {found.masked_lm_accuracy:.1%} (± {found.error:.1%}) of the masked tokens right, perplexity "
        f"{found.perplexity:.1f}"
    )
    for text, word in examples:
        (best,) = fill(text, 3)
        say(f"  {text}")
        say(f"    {', '.join(f'{each} {share:.0%}' for each, share in best)}; the text has: {word}")
    evaluations = [each for path in logs.glob("metrics_*.jsonl") for each in read_metrics(path).evaluations]
    say(outlook(evaluations, found, len(train)))


def _card(fill: GapFiller, found: EvaluationRecord, sources: Iterable[str], example: str) -> str:
    model, names = fill.source.model, [Path(name).name for name in sources]
    return _CARD.format(
        layers=counted(model.num_hidden_layers, "layer"),
        width=model.hidden_size,
        positions=model.max_position_embeddings,
        samples=found.samples,
        files=", ".join(names) if len(names) < _NAMED_FILES else counted(len(names), "file"),
        accuracy=found.masked_lm_accuracy,
        error=found.error,
        count=found.count,
        perplexity=found.perplexity,
        normalization=fill.normalization,
        example=example.replace('"', "'"),
    )


def examples_of(held_out: Dataset, vocabulary: Vocabulary) -> Iterator[tuple[str, str]]:
    """Yield pairs: the beginning of a held-out sample with a gap in place of its longest word, and that word."""
    samples = held_out.take(np.arange(min(_READ_SAMPLES, len(held_out))))
    ids = samples.unmasked_ids
    seen: set[str] = set()
    for start in samples.sequence_offsets[:-1].tolist():
        tokens = [vocabulary.tokens[index] for index in ids[start + 1 : start + _EXAMPLE_CHARACTERS].tolist()]
        words = _words(tokens[: tokens.index("[SEP]")] if "[SEP]" in tokens else tokens)
        plain = ["".join(piece.removeprefix("##") for piece in pieces) for pieces in words]
        whole = [pieces[0] for pieces in words if len(pieces) == 1 and pieces[0].isalpha()]
        if len(words) < _FEWEST_WORDS or not whole or "[UNK]" in plain:
            continue
        longest = max(whole, key=len)
        place = words.index([longest])
        text = " ".join([*plain[:place], MASK, *plain[place + 1 :]])
        if text not in seen:
            seen.add(text)
            yield text, longest
        if len(seen) == _EXAMPLES:
            return


def _words(tokens: Sequence[str]) -> list[list[str]]:
    """Group tokens into words, as many as fit into a line."""
    words: list[list[str]] = []
    characters = 0
    for token in tokens:
        characters += len(token) + 1
        if characters > _EXAMPLE_CHARACTERS:
            return words[:-1] if token.startswith("##") else words
        if token.startswith("##") and words:
            words[-1].append(token)
        else:
            words.append([token])
    return words


def outlook(evaluations: Sequence[EvaluationRecord], best: EvaluationRecord, samples: int) -> str:
    """Return a sentence on whether longer training would help, judged by the held-out accuracies during training.

    ``samples`` is the size of the training set.
    """
    curve = {each.samples: each.masked_lm_accuracy for each in evaluations}
    end = max(curve, default=0)
    passes = f"The training took each of its {samples:,} samples {end / samples:.1f} times."
    if end > best.samples and curve[end] < best.masked_lm_accuracy - best.error:
        return f"{passes} It was best after {best.samples:,}: longer training would not help, more text would."
    halfway = max((at for at in curve if at <= end / 2), default=None)
    if halfway is None:
        return f"{passes} It was too short to tell what longer training would bring."
    gain = curve[end] - curve[halfway]
    if gain < best.error:
        return f"{passes} Its second half brought no measurable gain: longer training may not help, more text would."
    return f"{passes} Its second half brought {100 * gain:.1f} points: longer training should bring more."
