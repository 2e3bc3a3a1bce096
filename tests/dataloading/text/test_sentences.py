"""The plain rule for sentence ends, in many scripts and on unusual punctuation."""

# ruff: noqa: RUF001 - other scripts have letters and marks that look like Latin ones

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloading.text.sentences import sentence_splitter

split = sentence_splitter("plain")


@pytest.mark.parametrize(
    "text",
    [
        "Он пришёл.|Она ушла!|Кто там?|«Иди!»|3 дома.",
        "Ήρθε σπίτι.|Πού είσαι;|Έλα εδώ!",
        "Il part.|À demain !|Été comme hiver.|«Ça va ?» dit-il.",
        "Hola.|¿Qué tal?|¡Bien!",
        "„Ja.“|Er ging.|»Nein.«|Über ihm.",
        "今天下雨。|明天晴！|后天呢？|不知道。|他说：“走吧！”|她走了。|好吗?|好。",
        "値は３．５です．|次です｡|「はい。」|以上．",
        "वह आया।|वह गया॥|क्या?|३ बजे।",
        "هل جاء؟|نعم، جاء.|وہ آیا۔|وہ گیا۔",
        "Նա եկավ։|Ես գնացի։",
        "እሱ መጣ።|እሷ ሄደች።",
        "သူလာတယ်။|သူသွားတယ်။",
        "គាត់មក។|នាងទៅ។",
        "ის მოვიდა.|მე წავედი.",
        "הוא בא.|היא הלכה.",
    ],
)
def test_text_in_many_scripts_is_split_at_sentence_ends(text: str) -> None:
    sentences = text.split("|")
    assert split(" ".join(sentences)) == sentences
    # These marks also end a sentence if no space follows.
    joined = re.sub(r"(?<=[。！？｡।॥؟۔։።။។])([”」]?)\|", r"\1", text)
    assert split(joined.replace("|", " ")) == sentences


def test_decimals_abbreviations_and_closing_marks_end_no_sentence() -> None:
    for sentence in (
        *("It is 3.5 or e.g. less, J. m. said.", "Это т.е. всё, 3.5 кг.", "“真的？”，他问。", "３．５。", "什么？！。"),
        *("Öl u. ä. öfter.", "。"),
    ):
        assert split(f" {sentence}\n") == [sentence]
    assert split(" \t\n") == []


@given(st.text(st.sampled_from(". !?\"'()[]aA1;:,-\t\x1f"), max_size=30))
def test_ascii_text_is_split_before_a_capital_a_digit_a_double_quote_or_a_round_bracket(text: str) -> None:
    stripped = text.strip()
    expected = re.split(r"(?<=[.!?])\s+(?=[A-Z0-9\"(])", stripped) if stripped else []
    assert split(text) == expected


@given(st.text(st.sampled_from(".!?;。！？।．”“」「\"' \u3000，aAäÄ中3\u0378\U00010428\U0001da88"), max_size=30))
def test_splitting_loses_only_blanks(text: str) -> None:
    sentences = split(text)
    assert "".join("".join(sentences).split()) == "".join(text.split())
    assert all(sentence.strip() == sentence != "" for sentence in sentences)
