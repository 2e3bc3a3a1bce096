"""Settings of the data stages: plain data that a command line is understood with, before anything large is imported."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

Compression = Literal["none", "gzip"]
"""Of our own shards."""
Layout = Literal["native", "fixed", "varlength", "packed"]
"""What `convert` writes."""
Sentences = Literal["punkt", "plain"]

EVALUATION_SAMPLES = 10_000
"""Of the benchmark's evaluation set."""

REFERENCE_PART_BYTES = 28_227_665
"""26.92 MiB, which makes 500 parts of the benchmark's dump."""

_MIN_SEQ_LENGTH = 5
"""[CLS] a [SEP] b [SEP]."""

_MAX_SEQ_LENGTH = (1 << 15) - 1
"""Lengths and positions are stored in 16 bits, and dumped in signed ones."""


@dataclass(frozen=True)
class ExtractionOptions:
    """Settings; the defaults are the benchmark's."""

    sentences: Sentences = "punkt"
    """punkt: the reference's sentence tokenizer, of the package nltk. plain: split at [.!?] before a space and a capital,
    digit, double quote or round bracket; needs nothing, and gives other text than the benchmark's."""
    evaluation_articles: int = 10_000
    """Articles to hold out for the evaluation set."""
    part_bytes: int = REFERENCE_PART_BYTES
    """Most bytes of WikiExtractor's files in a part."""
    seed: int = 12345
    """Of the choice of the evaluation articles."""

    def __post_init__(self) -> None:
        # A dataclass does not check the types of its fields, and not every caller is the command line, which does.
        if self.sentences not in get_args(Sentences):
            raise ValueError(f"sentences is {self.sentences!r}; expected punkt or plain")
        if self.evaluation_articles < 0:
            raise ValueError(f"evaluation_articles is {self.evaluation_articles}; expected 0 or more")
        if self.part_bytes < 1:
            raise ValueError(f"part_bytes is {self.part_bytes}; expected at least 1")


@dataclass(frozen=True)
class PretrainingOptions:
    """Flags of the reference script, under its names, with the values that MLPerf uses."""

    max_seq_length: int = 512
    """Most tokens in a sample, [CLS] and both [SEP] included."""
    max_predictions_per_seq: int = 76
    """Most masked tokens in a sample."""
    dupe_factor: int = 10
    """Passes over the documents, each with other pairs and masks."""
    short_seq_prob: float = 0.1
    """Share of documents that are cut into shorter samples."""
    masked_lm_prob: float = 0.15
    """Share of a sample's tokens to mask."""
    random_seed: int = 12345
    """Seed of every choice."""
    do_lower_case: bool = True
    """Lower the text and strip its accents, as an uncased vocabulary needs."""

    def __post_init__(self) -> None:
        if not _MIN_SEQ_LENGTH <= self.max_seq_length <= _MAX_SEQ_LENGTH:
            raise ValueError(
                f"max_seq_length is {self.max_seq_length}; expected {_MIN_SEQ_LENGTH} to {_MAX_SEQ_LENGTH}"
            )
        for name in ("max_predictions_per_seq", "dupe_factor"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        for name in ("short_seq_prob", "masked_lm_prob"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a probability from 0 to 1")


@dataclass(frozen=True)
class OwnText:
    """Settings of a data set from own text: the text, and what is made of it."""

    text: tuple[Path, ...]
    """Files of UTF-8 text with an empty line between documents, folders of such files, or patterns ("texts/**/*.txt")."""
    vocab: Path | None = None
    """The vocabulary to use, one token a line, or the folder of a Hugging Face model. By default one is learned."""
    vocab_size: int = 2048
    """Tokens of a learned vocabulary, or fewer where the text gives no more."""
    cased: bool = False
    """Keep capital letters and accents in a learned vocabulary. One that is given says itself which it is."""
    documents: Literal["blank-lines", "files"] = "blank-lines"
    """Where a document ends: at an empty line, or with its file, as in text with empty lines between paragraphs."""
    evaluation_share: float = 0.05
    """Share of the documents that is held out for evaluation, but at least five documents."""
    max_seq_length: int = 128
    """Most tokens in a sample, [CLS] and both [SEP] included."""
    dupe_factor: int = 10
    """Passes over the training text, each with other pairs and masks; two over the evaluation text."""
    seed: int = 12345
    """Of pairs and masks."""

    def __post_init__(self) -> None:
        if not self.text:
            raise ValueError("--text names no file; expected one or more")
        if not 0 < self.evaluation_share <= 0.5:
            raise ValueError(f"evaluation_share is {self.evaluation_share}; expected more than 0 and at most 0.5")
