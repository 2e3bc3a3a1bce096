"""Settings of the data stages: plain data that a command line is understood with, before anything large is imported."""

from dataclasses import dataclass
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
