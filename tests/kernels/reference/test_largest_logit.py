"""Counting correct predictions: which logit is the largest if several are equal, nearly equal or NaN."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from kernels import OPS
from tests.kernels.accuracy import EITHER


def correct(implementation: str, hidden: Tensor, decoder: Tensor, bias: Tensor, label: int) -> int:
    masked_lm_loss = OPS["masked_lm_loss"].implementations[implementation].function("masked_lm_loss")
    _, found = masked_lm_loss(hidden, decoder, bias, torch.tensor([label]))
    assert found is not None
    assert found.dtype == torch.int64
    return int(found)


@EITHER
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocabulary", [12, 5000])
def test_the_lowest_index_wins_among_equal_logits(implementation: str, vocabulary: int, dtype: torch.dtype):
    """Three classes have the largest logit: one near the start, one in the middle, and the last one."""
    tied = [3, vocabulary // 2, vocabulary - 1]
    decoder = torch.ones(vocabulary, 4, dtype=dtype)
    decoder[tied] = 2.0
    hidden, bias = torch.full((1, 4), 1.5, dtype=dtype), torch.zeros(vocabulary, dtype=dtype)
    found = [correct(implementation, hidden, decoder, bias, label) for label in (*tied, 2, 0)]
    assert found == [1, 0, 0, 0, 0]


@EITHER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [True, False])
def test_logits_are_compared_in_fp32(implementation: str, dtype: torch.dtype, autocast: bool):
    """The logits 16.001 and 16.003 both round to 16 in bf16 and fp16, but their fp32 values must be compared."""
    operands = torch.float32 if autocast else dtype
    for places in ((3, 9), (9, 3)):
        decoder = torch.zeros(40, 2, dtype=operands)
        decoder[list(places)] = torch.tensor([[16.0, 0.001], [16.0, 0.003]], dtype=operands)
        hidden, bias = torch.ones(1, 2, dtype=operands), torch.zeros(40, dtype=operands)
        with torch.autocast("cpu", dtype) if autocast else nullcontext():
            found = [correct(implementation, hidden, decoder, bias, label) for label in places]
        assert found == [0, 1]


@EITHER
@pytest.mark.parametrize("place", [0, 7])
def test_a_row_with_nan_is_never_counted_as_correct(implementation: str, place: int):
    hidden, decoder, bias = torch.zeros(1, 4), torch.ones(40, 4), torch.zeros(40)
    bias[place] = float("nan")
    assert [correct(implementation, hidden, decoder, bias, label) for label in (0, 7, 20)] == [0, 0, 0]
