"""Division of a model: layers among stages, and parameters and words among the ranks of a tensor group."""

from itertools import combinations, pairwise

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bert.configuration.sections import ModelConfig
from bert.execution.stopwatch import Stopwatch
from bert.model import MatrixProducts, parameter_shapes
from bert.parallel.mesh import Mesh
from bert.parallel.pipeline.stages import divided, layer_costs, stages_of
from bert.parallel.tensor.placement import Exchange, SharedPlacement
from bert.parallel.tensor.shards import Split, split_of
from kernels import masked_lm_loss
from tests.bert.parallel.forked import on_ranks


@pytest.mark.parametrize("count", range(1, 7))
def test_a_division_has_the_lowest_maximum_cost_and_then_the_lowest_sum_of_squares(count: int) -> None:
    costs = [3.0, 1, 4, 1, 5, 9, 2, 6]
    ranges = divided(costs, count)
    assert [number for each in ranges for number in each] == list(range(8))
    assert all(ranges)
    sums = [sum(costs[number] for number in each) for each in ranges]
    for cuts in combinations(range(1, 8), count - 1):
        others = [sum(costs[start:stop]) for start, stop in pairwise((0, *cuts, 8))]
        squares = [sum(each**2 for each in parts) for parts in (sums, others)]
        assert (max(sums), squares[0]) <= (max(others), squares[1])


def test_layers_are_divided_among_stages_by_cost_including_the_heads() -> None:
    """The last layer needs only keys and values for all tokens. Its other products, and the heads, need 15 % of them."""
    for hidden, wide, words in ((1024, 4096, 30522), (512, 512, 65000)):
        for layers in (2, 6):
            *others, last = layer_costs(ModelConfig(layers, hidden, 8, wide, words))
            assert others == [4 * hidden**2 + 2 * hidden * wide] * (layers - 1)
            rest = 2 * hidden**2 + 2 * hidden * wide + hidden**2 + hidden * words
            assert last == pytest.approx(2 * hidden**2 + 0.15 * rest, rel=1e-12)
    assert [list(stage.layers) for stage in stages_of(ModelConfig(num_hidden_layers=7), 2)] == [[0, 1, 2], [3, 4, 5, 6]]
    wordy = ModelConfig(num_hidden_layers=6, vocab_size=65000, hidden_size=512, intermediate_size=512)
    assert [list(stage.layers) for stage in stages_of(wordy, 2)] == [[0, 1, 2, 3], [4, 5]]


def test_exactly_one_stage_owns_each_parameter() -> None:
    stages = stages_of(ModelConfig(num_hidden_layers=5), 3)
    assert [(stage.is_first, stage.is_last) for stage in stages] == [(True, False), (False, False), (False, True)]
    for name in parameter_shapes(ModelConfig(num_hidden_layers=5)):
        first, _, rest = name.partition(".")
        place = (0, 1, 1, 2, 2)[int(rest[0])] if first == "layers" else 0 if first == "embeddings" else 2
        assert [stage.owns(name) for stage in stages] == [place == index for index in range(3)], name


def test_shards_are_consecutive_parts_of_every_block_and_can_be_joined() -> None:
    """If a block does not divide, its last shards are padded with zeros. Lengths of shards are multiples of ``multiple``."""
    for split, shards in (
        (Split((3,), 2, 0), [[1, 2], [3, 0]]),
        (Split((6,), 2, 0, blocks=3), [[1, 3, 5], [2, 4, 6]]),
        (Split((6,), 2, 0, blocks=2), [[1, 2, 4, 5], [3, 0, 6, 0]]),
        (Split((2, 3), 2, 1), [[[1, 2], [4, 5]], [[3, 0], [6, 0]]]),
        (Split((2, 4), 2, 1, blocks=2), [[[1, 3], [5, 7]], [[2, 4], [6, 8]]]),
        (Split((5, 1), 3, 0, multiple=2), [[[1], [2]], [[3], [4]], [[5], [0]]]),
        (Split((2,), 3, 0), [[1], [2], [0]]),
    ):
        whole = torch.arange(1, 1 + torch.Size(split.shape).numel()).view(split.shape)
        found = [split.shard(whole, rank) for rank in range(split.ranks)]
        assert [shard.tolist() for shard in found] == shards
        assert {tuple(shard.shape) for shard in found} == {split.shard_shape}
        assert torch.equal(split.whole(torch.stack([shard.flatten() for shard in found])), whole)


def test_products_and_the_word_table_are_divided_and_other_parameters_are_replicated() -> None:
    shapes = parameter_shapes(ModelConfig(2, 8, 2, 16, 30, 12))
    found = {name: split for name, shape in shapes.items() if (split := split_of(name, shape, 2))}
    inner = {
        "query_key_value.weight": Split((24, 8), 2, 0, blocks=3),
        "query_key_value.bias": Split((24,), 2, 0, blocks=3),
        "attention_output.weight": Split((8, 8), 2, 1),
        "intermediate.weight": Split((16, 8), 2, 0),
        "intermediate.bias": Split((16,), 2, 0),
        "output.weight": Split((8, 16), 2, 1),
    }
    ends = {"embeddings.word": Split((30, 8), 2, 0, multiple=8), "decoder_bias": Split((30,), 2, 0, multiple=8)}
    assert found == ends | {f"layers.{layer}.{name}": split for layer in (0, 1) for name, split in inner.items()}


@pytest.mark.parametrize("broken", [None, 0, 9], ids=str)
def test_the_loss_over_a_sharded_vocabulary_equals_the_unsharded_loss(broken: int | None) -> None:
    """Two shards of 8 rows hold 12 words, so the second has 4 rows of padding. Logits are whole numbers, some equal."""
    generator = torch.Generator().manual_seed(5)
    hidden_MD, word_VD = (torch.randint(0, 3, (rows, 4), generator=generator).float() for rows in (39, 12))
    bias_V, labels_M = torch.zeros(12), torch.arange(-1, 12).repeat(3)
    word_VD[0] = 2.0
    largest_M = (hidden_MD @ word_VD.T).argmax(1)
    labels_M[13:] = largest_M[13:]
    if broken is not None:
        bias_V[broken] = torch.nan
    loss, correct = masked_lm_loss(hidden_MD, word_VD, bias_V, labels_M)
    assert correct == (int((labels_M == largest_M).sum()) if broken is None else 0)

    def divided(mesh: Mesh) -> tuple[Tensor, Tensor | None]:
        assert dist.group.WORLD is not None
        placement = SharedPlacement(Exchange(dist.group.WORLD, Stopwatch()), 12)
        own = slice(8 * mesh.rank, 8 * mesh.rank + placement.share_of_words(12))
        shards = F.pad(word_VD, (0, 0, 0, 4))[own], F.pad(bias_V, (0, 4))[own]
        return placement.masked_lm_loss(MatrixProducts(), placement.own_rows(hidden_MD), *shards, labels_M, True)

    for found, counted in on_ranks(2, divided):
        torch.testing.assert_close(found, loss, equal_nan=True)
        assert counted == correct
