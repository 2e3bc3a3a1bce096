"""LAMB in Triton, under its interpreter, against a float64 oracle and against plain PyTorch in the same type."""

from dataclasses import astuple, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from kernels import LambSegments, LambState
from kernels.reference import lamb
from kernels.triton import lamb as triton_lamb
from tests.kernels.reference.test_lamb import HYPERPARAMETERS, NumpyLamb, pieces_of, split

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
    exact = NumpyLamb(split(flat, segments.sizes), segments.adapted, HYPERPARAMETERS)
    plain, found = flat.clone(), flat.clone()
    plain_state, found_state = LambState.zeros_like(flat), LambState.zeros_like(flat)
    ulp = torch.finfo(torch.float32).eps
    for step, gradient in enumerate(gradients, start=1):
        rate = 0.1 / step
        exact_norm = exact.step(split(gradient, segments.sizes), float(torch.tensor(rate)))
        lamb.lamb_step(plain, gradient.clone(), plain_state, segments, HYPERPARAMETERS, **at(step, rate))
        norm = triton_lamb.lamb_step(found, gradient, found_state, segments, HYPERPARAMETERS, **at(step, rate))
        assert norm.item() == pytest.approx(exact_norm, rel=1e-6)
        assert not gradient.any()
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
    hyper = replace(HYPERPARAMETERS, beta_1=betas[0], beta_2=betas[1], weight_decay=weight_decay)
    flat, gradients = weights_and_gradients(segments, 2, 1.0)
    exact, state = NumpyLamb(split(flat, segments.sizes), segments.adapted, hyper), LambState.zeros_like(flat)
    for step, gradient in enumerate(gradients, start=1):
        exact.step(split(gradient, segments.sizes), 0.125)
        triton_lamb.lamb_step(flat, gradient, state, segments, hyper, **at(step, 0.125))
    for weights, truth in zip(segments.views(flat), exact.weights, strict=True):
        assert error(weights, truth) < 1e-6


def test_zero_update_and_zero_weight_leave_a_ratio_of_one() -> None:
    segments = LambSegments((3, 3), (True, True))
    flat, state = torch.tensor([0.0, 0, 0, 1, 2, 3]), LambState.zeros_like(torch.zeros(6))
    hyper = replace(HYPERPARAMETERS, weight_decay=0.0)
    triton_lamb.lamb_step(flat, torch.zeros(6), state, segments, hyper, **at(1, 0.1))
    assert flat.tolist() == [0, 0, 0, 1, 2, 3]
    state = LambState.zeros_like(flat)
    triton_lamb.lamb_step(flat, torch.ones(6), state, segments, hyper, **at(1, 0.1))
    assert flat[:3].tolist() == pytest.approx([-0.1] * 3, rel=1e-5)


def test_no_element_outside_the_buffers_is_touched() -> None:
    """Buffers inside larger ones: what surrounds them stays, though chunks begin and end beyond them."""
    segments = LambSegments((37, 20), (True, False))
    surrounded = [torch.full((57 + 2 * CHUNK,), 7.0) for _ in range(5)]
    weights, gradient, *vectors = (whole[CHUNK:-CHUNK] for whole in surrounded)
    for buffer in (weights, gradient, *vectors):
        buffer.fill_(0.5)
    state = LambState(vectors[0], vectors[1], vectors[2], torch.tensor(0))
    triton_lamb.lamb_step(weights, gradient, state, segments, HYPERPARAMETERS, **at(1, 0.1))
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
    adapted = [segment for segment, adapted in enumerate(segments.adapted) if adapted]
    assert [chunks.places_G[segment].item() for segment in adapted] == list(range(len(adapted)))
    assert (chunks.places_G >= 0).tolist() == list(segments.adapted)
    of_chunks = chunks.table_C4[:, 0].tolist()
    assert len(chunks.spans_A2) == len(adapted)
    for segment, (begin, end) in zip(adapted, chunks.spans_A2.tolist(), strict=True):
        assert {place for place, owner in enumerate(of_chunks) if owner == segment} == set(range(begin, end))


def test_more_chunks_than_are_added_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment's sums reach over several rounds, as those of BERT-Large's word embeddings do."""
    monkeypatch.setattr(triton_lamb, "REDUCTION", 2)
    test_as_exact_as_plain_pytorch("as in BERT", 1.0)


@pytest.mark.parametrize("where", [0, CHUNK + 1, -1])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_a_step_that_is_not_finite_changes_nothing(bad: float, where: int) -> None:
    """Bad elements among many, or finite ones whose norm overflows; then a good step, as if the bad had not been."""
    segments = LambSegments((70, CHUNK + 30, 40), (True, True, False))
    flat, (first, second) = weights_and_gradients(segments, 2, 1.0)
    state = LambState.zeros_like(flat)
    triton_lamb.lamb_step(flat, first.clone(), state, segments, HYPERPARAMETERS, **at(1, 0.1))
    buffers = (flat, state.momentum_P, state.variance_P)
    before = [buffer.clone() for buffer in buffers]
    broken = second.clone()
    broken[[where, 5]] = bad
    norm = triton_lamb.lamb_step(flat, broken, state, segments, HYPERPARAMETERS, **at(2, 0.1))
    assert not norm.isfinite()
    assert state.skipped.item() == 1
    assert not broken.any()
    assert all(map(torch.equal, buffers, before))
    triton_lamb.lamb_step(flat, second.clone(), state, segments, HYPERPARAMETERS, **at(2, 0.1))
    assert state.skipped.item() == 1
    undisturbed = before[0].clone()
    other = LambState(before[1], before[2], torch.zeros_like(flat), torch.tensor(0))
    triton_lamb.lamb_step(undisturbed, second.clone(), other, segments, HYPERPARAMETERS, **at(2, 0.1))
    assert torch.equal(flat, undisturbed)


def test_a_first_step_that_is_not_finite_leaves_what_minus_zero_and_epsilon_zero_would_break() -> None:
    """With fresh moments and no epsilon, directions are 0 / 0; a weight of -0 keeps its sign."""
    weights = torch.tensor([-0.0, 1.0, 2.0])
    state, segments = LambState.zeros_like(weights), LambSegments((3,), (True,))
    hyper = replace(HYPERPARAMETERS, epsilon=0.0)
    triton_lamb.lamb_step(weights, torch.full((3,), torch.nan), state, segments, hyper, **at(1, 0.1))
    assert weights.tolist() == [0.0, 1.0, 2.0]
    assert weights[0].signbit()
    assert not state.momentum_P.any()
    assert not state.variance_P.any()


@pytest.mark.parametrize("cuts", [(CHUNK // 2,), (1, 7630, 7631), (7640, 7650, 7660, 12000), (2 * CHUNK, 3 * CHUNK)])
def test_shards_together_step_as_the_whole(cuts: tuple[int, ...]) -> None:
    """Borders anywhere in segments, several in one: at most twice the error of plain PyTorch on the whole vectors."""
    segments = LAYOUTS["as in BERT"]
    flat, gradients = weights_and_gradients(segments, 3, 1.0)
    exact = NumpyLamb(split(flat, segments.sizes), segments.adapted, HYPERPARAMETERS)
    plain, plain_state = flat.clone(), LambState.zeros_like(flat)
    found = Shards(flat, segments, cuts)
    for step, gradient in enumerate(gradients, start=1):
        exact.step(split(gradient, segments.sizes), float(torch.tensor(0.1)))
        lamb.lamb_step(plain, gradient.clone(), plain_state, segments, HYPERPARAMETERS, **at(step, 0.1))
        found.step(gradient, **at(step, 0.1))
    whole = torch.cat(found.weights)
    for mine, theirs, truth in zip(segments.views(whole), segments.views(plain), exact.weights, strict=True):
        assert error(mine, truth) <= 2 * error(theirs, truth) + torch.finfo(torch.float32).eps


def test_a_shard_without_adapted_pieces_and_one_of_padding() -> None:
    segments = LambSegments((64, 8), (True, False))
    flat, (gradient,) = weights_and_gradients(segments, 1, 1.0)
    whole, state = flat.clone(), LambState.zeros_like(flat)
    found = Shards(flat, segments, (64, 70), padding=5)
    found.step(gradient, **at(1, 0.1))
    triton_lamb.lamb_step(whole, gradient, state, segments, HYPERPARAMETERS, **at(1, 0.1))
    *shards, padding = found.weights
    assert torch.equal(torch.cat(shards), whole)
    assert not padding.any()


class Shards:
    """LAMB by both halves on pieces of the flat vector, in one process."""

    def __init__(self, flat: torch.Tensor, segments: LambSegments, cuts: tuple[int, ...], padding: int = 0) -> None:
        self.bounds = [0, *cuts, len(flat)]
        self.segments = segments
        self.weights = [flat[start:stop].clone() for start, stop in pairwise(self.bounds)]
        self.layouts = [pieces_of(segments, start, stop) for start, stop in pairwise(self.bounds)]
        if padding:
            self.weights.append(torch.zeros(padding))
            self.layouts.append((LambSegments((padding,), (False,)), []))
        self.states = [LambState.zeros_like(weights) for weights in self.weights]

    def step(self, gradient: torch.Tensor, *, step: torch.Tensor, learning_rate: torch.Tensor) -> None:
        norm = torch.linalg.vector_norm(gradient)
        gradients = [gradient[start:stop].clone() for start, stop in pairwise(self.bounds)]
        gradients += [torch.zeros_like(padding) for padding in self.weights[len(gradients) :]]
        sums_2A = torch.zeros(2, sum(self.segments.adapted), dtype=torch.float64)
        shards = list(zip(self.weights, gradients, self.states, self.layouts, strict=True))
        for weights, own, state, (layout, owners) in shards:
            squares = triton_lamb.lamb_directions(weights, own, state, layout, HYPERPARAMETERS, norm=norm, step=step)
            assert squares.shape == (2, len(owners))
            sums_2A.index_add_(1, torch.tensor(owners, dtype=torch.int64), squares)
        for weights, _, state, (layout, owners) in shards:
            triton_lamb.lamb_apply(weights, state, layout, sums_2A[:, owners], norm=norm, learning_rate=learning_rate)


def test_is_a_proper_operator() -> None:
    segments = LAYOUTS["as in BERT"]
    chunks = triton_lamb._chunks(segments, torch.device("cpu"))
    weights, gradients, *moments, update = (torch.rand(sum(segments.sizes)) for _ in range(5))
    step, rate = at(1, 0.1).values()
    norm, squares_2A = torch.tensor(2.0), torch.rand(2, sum(segments.adapted), dtype=torch.float64)
    tables = chunks.table_C4, chunks.places_G
    arguments: list[Any] = [weights, gradients, *moments, update, torch.tensor(0), *tables, chunks.spans_A2, norm, step]
    torch.library.opcheck(triton_lamb._lamb_directions, (*arguments, *astuple(HYPERPARAMETERS)))
    torch.library.opcheck(triton_lamb._lamb_apply, (weights, update, squares_2A, *tables, norm, rate))


def reasons(flat: torch.Tensor, sizes: tuple[int, ...] = (5,), **changes: torch.Tensor) -> list[str]:
    gradient, state = changes.pop("gradient", flat), LambState.zeros_like(flat)
    segments = LambSegments(sizes, (True,) * len(sizes))
    return triton_lamb.lamb_step_unsupported_reasons(
        flat, gradient, state, segments, HYPERPARAMETERS, **(at(1, 0.1) | changes)
    )


def test_says_what_it_cannot_do() -> None:
    flat = torch.zeros(5)
    assert reasons(flat) == []
    assert "5 parameters" in reasons(flat, sizes=(3, 1))[0]
    assert "float32" in reasons(flat.double())[0]
    assert "shapes" in reasons(flat, gradient=torch.zeros(6))[0]
    assert "shapes" in reasons(flat, gradient=torch.zeros(10)[::2])[0]
    assert "device" in reasons(flat, step=torch.zeros((), device="meta"))[0]


def test_says_what_the_halves_cannot_do() -> None:
    flat, squares_2A, one = torch.zeros(5), torch.zeros(2, 1), torch.tensor(1.0)
    state, segments = LambState.zeros_like(flat), LambSegments((3, 2), (True, False))

    def of_directions(**changes: torch.Tensor) -> list[str]:
        tensors = {"norm": one, "step": torch.tensor(1)} | changes
        return triton_lamb.lamb_directions_unsupported_reasons(flat, flat, state, segments, HYPERPARAMETERS, **tensors)

    def of_apply(squares_2A: torch.Tensor, **changes: torch.Tensor) -> list[str]:
        tensors = {"norm": one, "learning_rate": one} | changes
        return triton_lamb.lamb_apply_unsupported_reasons(flat, state, segments, squares_2A, **tensors)

    assert of_directions() == []
    assert "device" in of_directions(norm=torch.zeros((), device="meta"))[0]
    assert of_apply(squares_2A) == []
    assert "1 adapted" in of_apply(torch.zeros(2, 2))[0]
    assert "device" in of_apply(squares_2A, norm=torch.zeros((), device="meta"))[0]
