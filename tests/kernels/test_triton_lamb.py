"""LAMB in Triton, under its interpreter, against a float64 oracle and against plain PyTorch in the same type."""

from typing import Any

import numpy as np
import pytest
import torch

from kernels import LambSegments, LambState, lamb, triton_lamb
from tests.kernels.test_lamb import HYPERPARAMETERS, NumpyLamb, split

CHUNK = triton_lamb.CHUNK

LAYOUTS = {
    "one element": LambSegments((1,), (True,)),
    "nothing adapted": LambSegments((5, 3 * CHUNK), (False, False)),
    "chunks filled exactly": LambSegments((CHUNK, 2 * CHUNK), (True, True)),
    "one less, one more": LambSegments((CHUNK - 1, CHUNK + 1, CHUNK), (True, True, False)),
    "starts at every alignment": LambSegments((*range(1, 36), CHUNK), (True, False) * 18),
    "as in BERT": LambSegments((7630, 2 * CHUNK + 130, 512, 64, 64, 1024, 1024, 1024, 192, 2), (False, True) * 5),
}


def at(step: int, rate: float) -> dict[str, Any]:
    """The arguments that change from step to step."""
    return {"step": torch.tensor(step), "learning_rate": torch.tensor(rate)}


def error(found: torch.Tensor, exact: np.ndarray) -> float:
    """Largest error in units of the largest value."""
    return float(np.abs(found.double().numpy() - exact).max() / max(np.abs(exact).max(), 1e-30))


def weights_and_gradients(segments: LambSegments, steps: int, scale: float) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Segments of very different sizes of weight and gradient, and one that starts at zero."""
    generator = torch.Generator().manual_seed(len(segments.sizes))
    flat, *gradients = torch.randn(steps + 1, sum(segments.sizes), generator=generator).unbind()
    flat, gradients = flat.clone(), [scale * gradient for gradient in gradients]
    for number, segment in enumerate(segments.views(flat)):
        segment.mul_(2.0 ** (number % 7 - 3))
    segments.views(flat)[len(segments.sizes) // 2].zero_()
    for gradient in gradients:
        for number, segment in enumerate(segments.views(gradient)):
            segment.mul_(3.0 ** (number % 5 - 2))
    return flat, gradients


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_as_exact_as_plain_pytorch(layout: str, scale: float) -> None:
    """Weights, moments and norm over some steps: at most twice PyTorch's own error; one unit in the last place is free."""
    segments = LAYOUTS[layout]
    flat, gradients = weights_and_gradients(segments, 3, scale)
    exact = NumpyLamb(split(flat, segments.sizes), segments.adapted, **HYPERPARAMETERS)
    plain, found = flat.clone(), flat.clone()
    plain_state, found_state = LambState.zeros_like(flat), LambState.zeros_like(flat)
    ulp = torch.finfo(torch.float32).eps
    for step, gradient in enumerate(gradients, start=1):
        rate = 0.1 / step
        exact_norm = exact.step(split(gradient, segments.sizes), float(torch.tensor(rate)))
        lamb.lamb_step(plain, gradient.clone(), plain_state, segments, **at(step, rate), **HYPERPARAMETERS)
        before = gradient.clone()
        norm = triton_lamb.lamb_step(found, gradient, found_state, segments, **at(step, rate), **HYPERPARAMETERS)
        assert norm.item() == pytest.approx(exact_norm, rel=1e-6)
        assert torch.equal(gradient, before)
        for name, of_found, of_plain, of_exact in (
            ("weights", found, plain, exact.weights),
            ("momentum", found_state.momentum_P, plain_state.momentum_P, exact.momentum),
            ("variance", found_state.variance_P, plain_state.variance_P, exact.variance),
        ):
            for number, (mine, theirs, truth) in enumerate(
                zip(segments.views(of_found), segments.views(of_plain), of_exact, strict=True)
            ):
                assert error(mine, truth) <= 2 * error(theirs, truth) + ulp, (step, name, number)


@pytest.mark.parametrize("betas", [(0.0, 0.0), (0.60466, 0.85437)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_other_hyperparameters(betas: tuple[float, float], weight_decay: float) -> None:
    segments = LAYOUTS["as in BERT"]
    hyper: dict[str, Any] = HYPERPARAMETERS | {"beta_1": betas[0], "beta_2": betas[1], "weight_decay": weight_decay}
    flat, gradients = weights_and_gradients(segments, 2, 1.0)
    exact, state = NumpyLamb(split(flat, segments.sizes), segments.adapted, **hyper), LambState.zeros_like(flat)
    for step, gradient in enumerate(gradients, start=1):
        exact.step(split(gradient, segments.sizes), 0.125)
        triton_lamb.lamb_step(flat, gradient, state, segments, **at(step, 0.125), **hyper)
    for weights, truth in zip(segments.views(flat), exact.weights, strict=True):
        assert error(weights, truth) < 1e-6


def test_zero_update_and_zero_weight_leave_a_ratio_of_one() -> None:
    segments = LambSegments((3, 3), (True, True))
    flat, state = torch.tensor([0.0, 0, 0, 1, 2, 3]), LambState.zeros_like(torch.zeros(6))
    hyper: dict[str, Any] = HYPERPARAMETERS | {"weight_decay": 0.0}
    triton_lamb.lamb_step(flat, torch.zeros(6), state, segments, **at(1, 0.1), **hyper)
    assert flat.tolist() == [0, 0, 0, 1, 2, 3]
    state = LambState.zeros_like(flat)
    triton_lamb.lamb_step(flat, torch.ones(6), state, segments, **at(1, 0.1), **hyper)
    assert flat[:3].tolist() == pytest.approx([-0.1] * 3, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_copy(dtype: torch.dtype) -> None:
    """Of every weight, and the weights are the same with it as without."""
    segments = LAYOUTS["as in BERT"]
    flat, (gradient,) = weights_and_gradients(segments, 1, 1.0)
    without, copy_P = flat.clone(), torch.full_like(flat, torch.nan, dtype=dtype)
    for weights, copied_P in ((without, None), (flat, copy_P)):
        state = LambState.zeros_like(flat)
        triton_lamb.lamb_step(
            weights, gradient, state, segments, **at(1, 0.1), **HYPERPARAMETERS, low_precision_P=copied_P
        )
    assert torch.equal(flat, without)
    # the interpreter's cast may truncate: one unit in the last place
    torch.testing.assert_close(copy_P.float(), flat, rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_no_element_outside_the_buffers_is_touched() -> None:
    """Buffers inside larger ones: what surrounds them stays, though chunks begin and end beyond them."""
    segments = LambSegments((37, 20), (True, False))
    surrounded = [torch.full((57 + 2 * CHUNK,), 7.0) for _ in range(5)]
    weights, gradient, *moments = (whole[CHUNK:-CHUNK] for whole in surrounded)
    for buffer in (weights, gradient, *moments):
        buffer.fill_(0.5)
    triton_lamb.lamb_step(weights, gradient, LambState(*moments), segments, **at(1, 0.1), **HYPERPARAMETERS)
    for whole in surrounded:
        assert bool((whole[:CHUNK] == 7).all())
        assert bool((whole[-CHUNK:] == 7).all())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_chunks_cover_every_element_once(layout: str) -> None:
    segments = LAYOUTS[layout]
    chunks = triton_lamb._chunks(segments, torch.device("cpu"))
    owners = np.full(sum(segments.sizes), -1)
    for segment, unit, first, stop in chunks.table_C4.tolist():
        assert 0 <= first < stop <= CHUNK
        start = unit * triton_lamb.ALIGNMENT
        assert (owners[start + first : start + stop] == -1).all()
        owners[start + first : start + stop] = segment
    assert owners.tolist() == np.repeat(np.arange(len(segments.sizes)), segments.sizes).tolist()
    for segment, (begin, end) in enumerate(zip(chunks.bounds_G1[:-1], chunks.bounds_G1[1:], strict=True)):
        assert set(chunks.table_C4[begin:end, 0].tolist()) == {segment}


def test_more_chunks_than_are_added_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment's sums reach over several rounds, as those of BERT-Large's word embeddings do."""
    monkeypatch.setattr(triton_lamb, "REDUCTION", 2)
    test_as_exact_as_plain_pytorch("as in BERT", 1.0)


@pytest.mark.parametrize("low_precision", [False, True])
def test_is_a_proper_operator(low_precision: bool) -> None:
    segments = LAYOUTS["as in BERT"]
    chunks = triton_lamb._chunks(segments, torch.device("cpu"))
    buffers = [torch.rand(sum(segments.sizes)) for _ in range(5)]
    copy_P = torch.zeros_like(buffers[0], dtype=torch.bfloat16) if low_precision else None
    arguments: list[Any] = [*buffers, copy_P, chunks.table_C4, chunks.bounds_G1, chunks.adapted_G, *at(1, 0.1).values()]
    torch.library.opcheck(triton_lamb._lamb_step, (*arguments, *HYPERPARAMETERS.values()))


def reasons(flat: torch.Tensor, sizes: tuple[int, ...] = (5,), **changes: torch.Tensor) -> list[str]:
    gradient, state = changes.pop("gradient", flat), LambState.zeros_like(flat)
    segments = LambSegments(sizes, (True,) * len(sizes))
    return triton_lamb.unsupported_reasons(flat, gradient, state, segments, **(at(1, 0.1) | changes), **HYPERPARAMETERS)


def test_says_what_it_cannot_do() -> None:
    flat = torch.zeros(5)
    assert reasons(flat) == []
    assert reasons(flat, low_precision_P=torch.zeros(5, dtype=torch.bfloat16)) == []
    assert "5 parameters" in reasons(flat, sizes=(3, 1))[0]
    assert "float32" in reasons(flat.double())[0]
    assert "shapes" in reasons(flat, gradient=torch.zeros(6))[0]
    assert "shapes" in reasons(flat, gradient=torch.zeros(10)[::2])[0]
    assert "bfloat16" in reasons(flat, low_precision_P=torch.zeros(5))[0]
    assert "device" in reasons(flat, step=torch.zeros((), device="meta"))[0]
