"""Settings of the data stages. This module imports nothing large, so that the command line is parsed quickly."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

Layout = Literal["native", "packed"]
"""Layouts that `convert` writes."""
Sentences = Literal["punkt", "plain"]

EVALUATION_SAMPLES = 10_000
"""Number of samples in the benchmark's evaluation set."""

REFERENCE_PART_BYTES = 28_227_665
"""Maximum bytes of a text part. This size, 26.92 MiB, divides the benchmark's Wikipedia dump into 500 parts."""

_SHORTEST = 5
"""Length of the shortest sample, [CLS] a [SEP] b [SEP]."""

_LONGEST = (1 << 15) - 1
"""Length of the longest sample. Lengths and positions are stored in 16 bits, which are signed in some layouts."""


@dataclass(frozen=True)
class ExtractionOptions:
    """Settings of the extraction of text from articles. The defaults are the benchmark's."""

    sentences: Sentences = "punkt"
    """punkt: the reference's sentence tokenizer, from the package nltk. plain: end a sentence after . ! or ? if
    a space and a capital, digit, quote or bracket follow, and after the sentence ends of other scripts. plain needs no
    package, but its text differs from the benchmark's."""
    evaluation_articles: int = 10_000
    """Articles to hold out for the evaluation set."""
    part_bytes: int = REFERENCE_PART_BYTES
    """Maximum bytes of WikiExtractor's files in one part."""
    seed: int = 12345
    """Seed for choosing held-out articles."""

    def __post_init__(self) -> None:
        if self.evaluation_articles < 0:
            raise ValueError(f"--evaluation-articles is {self.evaluation_articles}; expected 0 or more")
        if self.part_bytes < 1:
            raise ValueError(f"--part-bytes is {self.part_bytes}; expected at least 1")


@dataclass(frozen=True)
class Normalization:
    """What is done to text before it is split into tokens. Fields have the names of transformers' ``BertTokenizer``."""

    do_lower_case: bool = True
    strip_accents: bool = True
    tokenize_chinese_chars: bool = True

    def __str__(self) -> str:
        return (
            f"{'lower case' if self.do_lower_case else 'capital letters kept'}, "
            f"accents {'stripped' if self.strip_accents else 'kept'}, "
            f"Chinese characters {'as separate words' if self.tokenize_chinese_chars else 'not separated'}"
        )

    @classmethod
    def of(
        cls, do_lower_case: bool = True, strip_accents: bool | None = None, tokenize_chinese_chars: bool = True
    ) -> Self:
        """Return a normalization. By default, accents are stripped if text is lower-cased, as in the reference."""
        return cls(do_lower_case, do_lower_case if strip_accents is None else strip_accents, tokenize_chinese_chars)

    @classmethod
    def recorded(cls, options: Mapping[str, object]) -> Self | None:
        """Return the normalization that a data set or a checkpoint records, or None if it records none."""
        lower = options.get("do_lower_case")
        if not isinstance(lower, bool):
            return None
        # Earlier versions recorded only whether text was lower-cased.
        chinese = options.get("tokenize_chinese_chars", True) is not False
        return cls(lower, options.get("strip_accents", lower) is True, chinese)


@dataclass(frozen=True)
class NormalizationOptions:
    """Settings that override what a tokenizer's files state about text normalization, or what is guessed."""

    do_lower_case: bool | None = None
    """Lower-case the text. None: do what tokenizer.json or tokenizer_config.json beside the vocabulary states, or else guess
    from the vocabulary."""
    strip_accents: bool | None = None
    """Strip accents. None: do what the tokenizer's files state. If only the letter case is set or stated, strip the accents
    of lower-cased text. If neither is set or stated, guess from the vocabulary."""
    tokenize_chinese_chars: bool | None = None
    """Treat each Chinese character as a word. None: do what the tokenizer's files state (default True), or guess from the
    vocabulary if there are no such files."""


AS_STATED = NormalizationOptions()
"""Override nothing: normalize text as the tokenizer's files state, or as is guessed from the vocabulary."""


@dataclass(frozen=True)
class PretrainingOptions:
    """Flags of the reference script, with the same names, and with MLPerf's values as defaults."""

    max_seq_length: int = 512
    """Maximum number of tokens in a sample, [CLS] and both [SEP] included."""
    max_predictions_per_seq: int = 76
    """Maximum number of masked tokens in a sample."""
    dupe_factor: int = 10
    """Number of passes over the documents. Each pass has different sentence pairs and masks."""
    short_seq_prob: float = 0.1
    """Probability that a document is cut into shorter samples."""
    masked_lm_prob: float = 0.15
    """Share of the tokens in a sample that are masked."""
    random_seed: int = 12345
    """Seed of all random choices."""
    do_lower_case: bool = True
    """Lower-case the text, for an uncased vocabulary."""
    strip_accents: bool | None = None
    """Strip accents. None: only if the text is lower-cased, as in the reference."""
    tokenize_chinese_chars: bool = True
    """Treat each Chinese character as a word, as in the reference."""

    def __post_init__(self) -> None:
        if not _SHORTEST <= self.max_seq_length <= _LONGEST:
            raise ValueError(f"--max_seq_length is {self.max_seq_length}; expected {_SHORTEST} to {_LONGEST}")
        for name in ("max_predictions_per_seq", "dupe_factor"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} is {getattr(self, name)}; expected at least 1")
        for name in ("short_seq_prob", "masked_lm_prob"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"--{name} is {getattr(self, name)}; expected a probability from 0 to 1")

    @property
    def normalization(self) -> Normalization:
        return Normalization.of(self.do_lower_case, self.strip_accents, self.tokenize_chinese_chars)

    @property
    def recorded(self) -> dict[str, int | float | bool | str]:
        """The settings by name, as a data set's manifest records them."""
        return asdict(self) | asdict(self.normalization)


@dataclass(frozen=True)
class OwnText:
    """Settings for making data sets from your own text."""

    vocab: Path | None = None
    """Vocabulary file with one token a line, or folder of a Hugging Face model. By default, a vocabulary is learned."""
    normalization: NormalizationOptions = AS_STATED
    vocab_size: int = 2048
    """Maximum number of tokens in a learned vocabulary."""
    cased: bool = False
    """Keep capital letters and accents, which a learned vocabulary otherwise lacks."""
    accept_losses: bool = False
    """Go on if more than half of the text would be lost."""
    documents: Literal["blank-lines", "files"] = "blank-lines"
    """End of a document: an empty line, or the end of the file (for text with empty lines between paragraphs)."""
    evaluation_share: float = 0.05
    """Share of the documents to hold out for evaluation, at least five documents. The evaluation set has about 10,000
    masked tokens if the documents are long enough."""
    max_seq_length: int = 128
    """Maximum number of tokens in a sample, [CLS] and both [SEP] included."""
    dupe_factor: int = 10
    """Passes over the training text, each with different sentence pairs and masks."""
    seed: int = 12345
    """Seed for choosing sentence pairs and masks."""

    def __post_init__(self) -> None:
        if not 0 < self.evaluation_share <= 0.5:
            raise ValueError(f"--evaluation-share is {self.evaluation_share}; expected more than 0 and at most 0.5")
