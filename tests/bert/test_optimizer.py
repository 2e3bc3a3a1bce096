"""The optimizer of a model: the division of its parameters into segments, and the learning rate."""

import pytest
import torch

from bert.checkpoints.initial_model import initialize_
from bert.configuration.recipes import RECIPES
from bert.configuration.sections import ModelConfig, OptimizerConfig
from bert.model import BertForPreTraining
from bert.optimizer import FlatParameters, Lamb, learning_rate
from bert.parallel.reduction.gradients import bucket_slices


def small_model() -> BertForPreTraining:
    model = BertForPreTraining(ModelConfig(2, 8, 2, 16, 30, 12))
    initialize_(model, seed=0)
    return model


def test_segments_are_parameters_and_thirds_of_the_fused_weight():
    """A segment is a parameter or a third of the fused QKV weight. A parameter's last segment includes its padding."""
    model = small_model()
    flat = FlatParameters.of(model)
    sizes = iter(zip(flat.segments.sizes, flat.segments.adapted, strict=True))
    start = 0
    for name, parameter in model.named_parameters():
        assert flat.places[parameter] == slice(start, start + parameter.numel()), name
        excluded = name.endswith("bias") or "norm" in name
        parts = 3 if name.endswith("query_key_value.weight") else 1
        for part in range(parts):
            size, adapted = next(sizes)
            padding = -parameter.numel() % 16 if part == parts - 1 else 0
            assert (size - padding, adapted) == (parameter.numel() // parts, not excluded), name
            start += size
    assert next(sizes, None) is None
    assert start == len(flat.weights_P)


@pytest.mark.parametrize("recipe", ["tiny_cpu", "h100_1x8", "dgxa100_1x8"])
@pytest.mark.parametrize("ranks", [1, 24, 4096])
def test_parameters_gradients_and_shards_are_aligned_to_16_elements(recipe: str, ranks: int):
    with torch.device("meta"):
        model = BertForPreTraining(RECIPES[recipe]().model)
    flat = FlatParameters.of(model, ranks)
    assert list(flat.places) == list(model.parameters())
    assert all(place.start % 16 == 0 for place in flat.places.values())
    for bucket in bucket_slices(len(flat.weights_N), ranks, RECIPES[recipe]().training.bucket_bytes):
        piece, rest = divmod(bucket.stop - bucket.start, ranks)
        assert (bucket.start % 16, piece % 16, rest) == (0, 0, 0)
    assert 0 <= len(flat.weights_P) - sum(parameter.numel() for parameter in model.parameters()) < 1000


def test_padding_remains_zero_and_does_not_change_the_gradient_norm():
    """The sizes of this model are not multiples of the alignment, so parameters need padding."""
    model = BertForPreTraining(ModelConfig(2, 6, 2, 10, 31, 7))
    initialize_(model, seed=0)
    flat = FlatParameters.of(model, 3)
    assert flat.weights_P.data_ptr() % 64 == 0
    padding, exact = torch.ones_like(flat.weights_N, dtype=torch.bool), 0.0
    for parameter, place in flat.places.items():
        padding[place] = False
        assert parameter.grad is not None
        assert parameter.data_ptr() % 16 == parameter.grad.data_ptr() % 16 == 0
        parameter.grad.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        exact += parameter.grad.double().square().sum().item()
    assert Lamb(flat, OptimizerConfig(0.1, 10)).step().item() == pytest.approx(exact**0.5, rel=1e-6)
    assert not flat.weights_N[padding].any()
    assert padding.sum() > 20


@pytest.mark.parametrize(
    ("base", "train_steps", "warmup", "start", "expected"),
    [
        # no warm-up: the rate is base * (1 - step / train_steps) from the first step
        (4.25e-4, 6700, 0, 0, {0: 4.25e-4, 3350: 2.125e-4, 6700: 0.0, 7000: 0.0}),
        # as submitted on 64 GPUs: the warm-up counts from step -25, but the decay from 0, so the rate jumps at 75
        (1.5e-3, 1271, 100, -25, {0: 3.75e-4, 74: 1.485e-3, 75: 1.5e-3 * (1 - 75 / 1271)}),
        # "flat" schedule: nearly the base rate for 330 steps, then a drop to 0.529 of the base rate
        (2.58e-3, 700, 200330, -200000, {0: 2.58e-3 * 200000 / 200330, 330: 2.58e-3 * (1 - 330 / 700)}),
        # 0.95 to 1.0 of the base rate over 500 steps, then a drop to 0.51 of it
        (2e-3, 1024, 10000, -9500, {0: 1.9e-3, 499: 2e-3 * 0.9999, 500: 2e-3 * (1 - 500 / 1024)}),
        (1e-3, 100, 10, 0, {0: 0.0, 5: 5e-4, 9: 9e-4, 10: 9e-4, 99: 1e-5}),
    ],
)
def test_the_learning_rate_warms_up_and_decays_linearly(
    base: float, train_steps: int, warmup: int, start: int, expected: dict[int, float]
):
    config = OptimizerConfig(base, train_steps, num_warmup_steps=warmup, start_warmup_step=start)
    rates = learning_rate(config, torch.arange(8000))
    assert rates.dtype == torch.float64
    assert {step: rates[step].item() for step in expected} == pytest.approx(expected, rel=1e-12, abs=1e-18)
    assert not rates[train_steps:].any(), "past the end of the schedule"
    assert learning_rate(config, torch.tensor(50)) == rates[50]
