"""Division of layers into stages."""

from itertools import combinations, pairwise

import pytest
import torch

from bert.configuration.sections import ModelConfig
from bert.model import BertForPreTraining
from bert.parallel.pipeline.stages import divided, layer_costs, stages_of


@pytest.mark.parametrize("count", range(1, 7))
def test_no_other_division_has_a_lower_highest_cost_or_is_as_even(count: int) -> None:
    costs = [3.0, 1, 4, 1, 5, 9, 2, 6]
    ranges = divided(costs, count)
    assert [number for each in ranges for number in each] == list(range(8))
    assert all(ranges)
    sums = [sum(costs[number] for number in each) for each in ranges]
    for cuts in combinations(range(1, 8), count - 1):
        others = [sum(costs[start:stop]) for start, stop in pairwise((0, *cuts, 8))]
        squares = [sum(each**2 for each in parts) for parts in (sums, others)]
        assert (max(sums), squares[0]) <= (max(others), squares[1])


def test_the_last_stage_has_more_layers_as_its_last_one_and_the_heads_cost_less_than_another() -> None:
    costs = layer_costs(ModelConfig())
    assert costs[0] == 12 * 1024**2
    assert 0.6 < costs[-1] / costs[0] < 0.8
    assert [len(stage.layers) for stage in stages_of(ModelConfig(), 4)] == [6, 6, 6, 6]
    assert [len(stage.layers) for stage in stages_of(ModelConfig(num_hidden_layers=7), 2)] == [3, 4]
    wordy = ModelConfig(num_hidden_layers=6, vocab_size=65000, hidden_size=512, intermediate_size=512)
    assert [len(stage.layers) for stage in stages_of(wordy, 2)] == [4, 2]


def test_every_parameter_has_one_stage_that_updates_it() -> None:
    with torch.device("meta"):
        model = BertForPreTraining(ModelConfig(num_hidden_layers=5))
    stages = stages_of(model.config, 3)
    assert [(stage.is_first, stage.is_last) for stage in stages] == [(True, False), (False, False), (False, True)]
    for name, _ in model.named_parameters():
        [owner] = [stage for stage in stages if stage.owns(name)]
        assert owner.is_first or not name.startswith("embeddings.")
        assert owner.is_last or name.startswith(("embeddings.", "layers."))
