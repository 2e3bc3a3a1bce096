"""Creation of samples, compared with the reference's output and with a definition in plain Python."""

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numba.core import config

from benchmarks.data_stages import reference_prepare
from dataloading.options import Normalization, PretrainingOptions
from dataloading.preparation import pretraining_data
from dataloading.preparation.pretraining_data import (
    _next_word,
    _random,
    _random_below,
    _shuffle,
    compiled,
    create_samples,
)
from dataloading.shards.samples import Samples
from dataloading.text.documents import read_documents
from dataloading.text.tokenization import Tokenizer, tokenize_documents
from dataloading.text.vocabulary import SPECIAL_TOKENS, Vocabulary

SHARED = Path(__file__).parents[4] / "shared/data"
GOLDEN = Path(__file__).parent / "golden"
WORDS = [f"w{index}" for index in range(30)]
VOCABULARY = Vocabulary((*SPECIAL_TOKENS, *WORDS, *"abcdefgh", *(f"##{letter}" for letter in "abcdefgh")))


def prepare(texts: list[Path], vocabulary: Vocabulary, options: PretrainingOptions) -> Samples:
    tokenizer = Tokenizer(vocabulary, options.normalization)
    return create_samples(tokenize_documents(read_documents(texts), tokenizer), options, vocabulary)


@pytest.mark.parametrize(
    ("golden", "text", "options"),
    [
        ("edge_128", "edge.txt", PretrainingOptions(max_seq_length=128, max_predictions_per_seq=20, dupe_factor=5)),
        ("edge_512", "edge.txt", PretrainingOptions(dupe_factor=2)),
        ("wiki00_512", "wiki_00.txt", PretrainingOptions(dupe_factor=3)),
    ],
)
def test_samples_are_bit_identical_to_the_reference_scripts_samples(
    golden: str, text: str, options: PretrainingOptions
) -> None:
    if not SHARED.exists():
        pytest.skip("needs ../shared/data: the vocabulary and the Wikipedia text may not be copied here")
    is_made_up = text == "edge.txt"
    vocabulary = Vocabulary.from_file(SHARED / "vocab.txt")
    samples = prepare([(GOLDEN if is_made_up else SHARED) / text], vocabulary, options)
    expected = np.load((GOLDEN if is_made_up else SHARED / "golden") / f"{golden}.npz", allow_pickle=False)
    np.testing.assert_array_equal(samples.lengths, expected["length"])
    np.testing.assert_array_equal(samples.masked_counts, expected["masked_count"])
    np.testing.assert_array_equal(samples.next_sentence_labels, expected["next_sentence_label"])
    for name in ("input_ids", "segment_ids", "masked_lm_positions", "masked_lm_ids"):
        np.testing.assert_array_equal(getattr(samples, name), expected[name], err_msg=name)
        assert getattr(samples, name).dtype == expected[name].dtype


sentences = st.lists(st.sampled_from([*WORDS, "abc", "hah", "!", "\u200b", "É"]), min_size=1, max_size=12).map(" ".join)
lines_alone = st.sampled_from(["", "", " \t", "\x1c", "\u200b", "a\rb", " e\u2028f "])
texts = st.lists(sentences | lines_alone, min_size=1, max_size=25)
some_options = st.builds(
    PretrainingOptions,
    max_seq_length=st.integers(5, 40),
    max_predictions_per_seq=st.integers(1, 12),
    dupe_factor=st.integers(1, 4),
    short_seq_prob=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    masked_lm_prob=st.sampled_from([0.0, 0.05, 0.15, 0.5, 1.0]),
    random_seed=st.integers(0, 2**70),
    do_lower_case=st.booleans(),
)


@given(st.lists(texts, min_size=1, max_size=3), some_options, st.booleans())
@example([["w1 w2 w3"]], PretrainingOptions(dupe_factor=1), False)  # random segments come from the only document
def test_samples_equal_the_samples_of_a_plain_python_definition(
    tmp_path: Path, files: list[list[str]], options: PretrainingOptions, ends_with_newline: bool
) -> None:
    paths = []
    for index, lines in enumerate(files):
        paths.append(tmp_path / f"{index}.txt")
        text = "\n".join([*lines, f"w{index}"]) + "\n" * ends_with_newline
        paths[-1].write_bytes(text.encode())
    expected = reference_prepare.prepare(paths, VOCABULARY.ids, options)
    assert prepare(paths, VOCABULARY, options).digest() == expected.digest()


def test_random_numbers_equal_those_of_python() -> None:
    theirs = random.Random(5)
    ours = np.array(theirs.getstate()[1], np.uint32)
    assert [_next_word(ours) for _ in range(1300)] == [theirs.getrandbits(32) for _ in range(1300)]
    assert [_random(ours) for _ in range(100)] == [theirs.random() for _ in range(100)]
    for bound in (1, 2, 3, 8, 1000):
        assert [_random_below(ours, bound) for _ in range(50)] == [theirs.randint(0, bound - 1) for _ in range(50)]
        _shuffle(ours, items := np.arange(bound))
        theirs.shuffle(expected := list(range(bound)))
        assert items.tolist() == expected


def test_sentences_and_documents_without_tokens_are_left_out() -> None:
    tokenizer = Tokenizer(VOCABULARY, Normalization())
    tokenized = tokenize_documents([["\u200b"], ["w1", "\0", "w2 w3"], [], ["w4", "\u200b"]], tokenizer)
    assert [tokenizer.vocabulary.tokens[index] for index in tokenized.token_ids] == ["w1", "w2", "w3", "w4"]
    assert len(tokenized.sentence_offsets) == 4
    assert tokenized.document_offsets.tolist() == [0, 2, 3]
    with pytest.raises(ValueError, match="no tokens"):
        tokenize_documents([["\u200b"]], tokenizer)


def plain(number: int) -> int:
    return number + 1


def test_functions_are_cached_only_where_no_other_user_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Numba's cache contains pickles, which can run any code."""
    monkeypatch.setattr(pretraining_data, "is_private", lambda folder: folder.parent.name == "private")
    for name in ("private", "shared"):
        monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / name))
        for _ in range(2):
            assert (compiled(plain).stats.cache_path is not None) is (name == "private")
        assert len(caplog.messages) == (name == "shared"), "one warning for a folder"
    monkeypatch.setattr(config, "DISABLE_JIT", True)
    assert compiled(plain) is plain
