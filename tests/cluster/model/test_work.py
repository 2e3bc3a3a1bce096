"""Sizes of micro-batches and counts of computations, added up by hand, and machines that targets describe."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert.configuration.sections import ModelConfig
from bert.train import parse
from cluster.devices import device_named
from cluster.model.rates import target_of_devices
from cluster.model.work import Computation, MicroBatches, Strategy, Work, parts_of, strategy_of, work_to_plan
from tests.conftest import SmallRun

LENGTHS, MASKED = np.array([5, 5, 3, 2], np.uint16), np.array([1, 2, 1, 1], np.uint16)
MODEL = ModelConfig(2, 128, 4, 512, 1000, 8)


def numbers(sizes: MicroBatches) -> list[float]:
    names = ("tokens_AR", "masked_AR", "pairs_AR", "last_pairs_AR", "lengths_AR", "equal_AR")
    counts = [np.asarray(getattr(sizes, name)) for name in names]
    assert {each.shape for each in counts} == {counts[0].shape}
    return [sizes.sequences, *(float(each.sum()) for each in counts)]


def test_sizes_of_micro_batches_follow_from_their_sequences() -> None:
    work = Work(MODEL, LENGTHS, MASKED)
    # In the last layer, only [CLS] and the masked tokens of a sequence attend to its tokens.
    pairs, last_pairs = 25 + 25 + 9 + 4, 2 * 5 + 3 * 5 + 2 * 3 + 2 * 2
    assert numbers(work.micro_batches(Strategy(4), 1, 0)) == [4, 15, 5, pairs, last_pairs, 3, 10]
    assert numbers(work.typical(8, lengths=2.5)) == [8, 30, 10, 126, 70, 2.5, 0]
    # On four ranks, each of two copies of the model processes two micro-batches of one sequence.
    sizes = work.micro_batches(Strategy(4, 2, tensor=2), 4, 0)
    assert sizes.tokens_AR.shape == (2, 2)
    assert numbers(sizes) == [1, 15, 5, 63, 35, 4, 0]
    assert work.distinct_lengths == 3
    for train, evaluation in ((0, 1), (4, 0)):
        with pytest.raises(ValueError, match="set is empty"):
            Work(MODEL, LENGTHS[:train], MASKED[:train], evaluation)
    with pytest.raises(ValueError, match="max_position_embeddings is 4, but the data have a sequence of 5"):
        Work(ModelConfig(2, 128, 4, 512, 1000, 4), LENGTHS, MASKED)


def test_work_and_strategy_follow_from_the_data_and_settings_of_a_run(small_run: SmallRun, tmp_path: Path) -> None:
    config = parse(small_run.arguments(tmp_path, training__max_steps=9, evaluation__batch_size=50))
    work, strategy = work_to_plan(config), strategy_of(config)
    assert (work.model, work.lengths.tolist()) == (config.model, small_run.train.lengths.tolist())
    assert work.masked_counts.tolist() == small_run.train.masked_counts.tolist()
    assert (work.evaluation_sequences, work.evaluation_batch_size) == (len(small_run.evaluation.lengths), 50)
    assert (work.samples, work.interval_samples, work.seed) == (9 * 16, 80, 7)
    assert (strategy.global_batch_size, strategy.precision, strategy.reduction) == (16, "fp32", "flat")


@pytest.mark.parametrize("tensor", [1, 2])
def test_computations_of_a_micro_batch_equal_a_count_by_hand(tensor: int) -> None:
    """``D``, ``F`` and ``V`` are a rank's part of the hidden size, the intermediate size and the vocabulary."""
    sizes = Work(MODEL, LENGTHS, MASKED).micro_batches(Strategy(4, tensor=tensor), tensor, 0)
    embedding, layer, last = parts_of(MODEL, sizes, tensor)
    D, F, V, heads = 128 // tensor, 512 // tensor, {1: 1000, 2: 504}[tensor], 4 / tensor

    def products(*shapes: tuple[float, int, int]) -> list[tuple[str, list[float]]]:
        return [("linear", [1, rows * a * b, rows * (a + b), a * b]) for rows, a, b in shapes]

    def counts(computations: list[Computation]) -> list[tuple[str, list[float]]]:
        return [(each.kind, [float(np.sum(count)) for count in each.counts]) for each in computations]

    def rest(rows: int) -> list[tuple[str, list[float]]]:
        out, up, down = products((rows, D, 128), (rows, 128, F), (rows, F, 128))
        return [out, ("norm", [1, rows * D]), up, ("gelu", [1, rows * F]), down, ("norm", [1, rows * D])]

    assert counts(embedding) == [("embedding", [1, 15 * 128, V * 128])]
    attention: list[Any] = ["attention", [3, 15 * D, 63 * heads, 63 * D]]
    assert counts(layer) == [*products((15, 128, 3 * D)), tuple(attention), *rest(15)]
    attention = ["attention", [4, (15 + 9) / 2 * D, 35 * heads, 35 * D]]
    outputs = products((4 / tensor, 128, 128), (4 / tensor, 128, 2), (5 / tensor, 128, 128))
    heads_rest = [("gelu", [1, 5 * D]), ("norm", [1, 5 * D]), *products((5, 128, V)), ("loss", [1, 5 * V])]
    assert counts(last) == [*products((15, 128, 2 * D), (9, 128, D)), tuple(attention), *rest(9), *outputs, *heads_rest]
    assert [each.in_encoder for each in layer if each.kind == "linear"] == [True] * 4
    assert not any(each.in_encoder for each in last)


def test_a_strategy_formats_its_stages_and_refuses_indivisible_batches() -> None:
    assert [Strategy(8, pipeline=4, virtual_stages=virtual).stages for virtual in (1, 2)] == ["4", "4 x 2"]
    assert Strategy(8, 2, tensor=2).sequences(4) == 2
    said = r"global_batch_size is 6, which 2 copies of the model \(4 ranks\) x 2 micro-batches .* multiple of 4\."
    with pytest.raises(ValueError, match=said):
        Strategy(6, 2, tensor=2).sequences(4)


def test_a_target_from_a_data_sheet_has_whole_nodes_and_supported_precisions() -> None:
    device = device_named("A100")
    for count, shape in {1: (1, 1), 8: (1, 8), 24: (3, 8)}.items():
        target = target_of_devices(device, count, 8)
        assert (target.nodes, target.ranks_per_node, target.world_size) == (*shape, count)
        assert ({*target.rates}, {*target.missing}, target.on_gpu) == ({"bf16"}, {"fp32", "fp8"}, True)
        assert target.rates["bf16"].memory_bytes == 80e9, "GB, and not GiB"
