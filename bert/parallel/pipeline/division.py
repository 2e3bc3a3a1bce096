"""Division of a model into stages of consecutive layers that minimises the cost of the most expensive stage."""

from dataclasses import dataclass
from functools import cache

from bert.configuration.sections import ModelConfig

_MASKED_SHARE = 0.15
"""Fraction of tokens that the heads read. BERT masks 15 % of the tokens; the [CLS] tokens are negligible."""


@dataclass(frozen=True)
class Stage:
    """Consecutive layers of the model; the first stage also has the embeddings, the last stage the heads."""

    index: int
    count: int
    """Number of stages of the model."""
    layers: range

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def owns(self, name: str) -> bool:
        """Tell whether the stage updates the parameter ``name``."""
        match name.split("."):
            case ["embeddings", *_]:
                return self.is_first
            case ["layers", layer, *_]:
                return int(layer) in self.layers
        return self.is_last


def stages_of(config: ModelConfig, count: int) -> list[Stage]:
    return [Stage(index, count, layers) for index, layers in enumerate(divided(layer_costs(config), count))]


def layer_costs(config: ModelConfig) -> list[float]:
    """Return, for each layer, the multiply-adds per token with its weights; the last layer includes the heads.

    Attention adds the same cost to every layer and is omitted. The last layer computes keys and values for all tokens, and
    everything else only for the rows that the heads read. The embeddings multiply nothing.
    """
    hidden, wide = config.hidden_size, config.intermediate_size
    rows = _MASKED_SHARE * hidden * (2 * hidden + 2 * wide)  # query, attention output, fc1, fc2
    heads = _MASKED_SHARE * hidden * (hidden + config.vocab_size)  # transform, decoder
    layer = hidden * (4 * hidden + 2 * wide)  # query, key, value, attention output, fc1, fc2
    return [float(layer)] * (config.num_hidden_layers - 1) + [2 * hidden**2 + rows + heads]


def divided(costs: list[float], count: int) -> list[range]:
    """Divide costs into ``count`` consecutive ranges that minimise the highest sum, then the sum of squares."""

    @cache
    def best(start: int, ranges: int) -> tuple[float, float, tuple[int, ...]]:
        if ranges == 1:
            cost = sum(costs[start:])
            return cost, cost**2, (len(costs),)
        choices = []
        for stop in range(start + 1, len(costs) - ranges + 2):
            cost = sum(costs[start:stop])
            highest, squares, stops = best(stop, ranges - 1)
            choices.append((max(cost, highest), squares + cost**2, (stop, *stops)))
        return min(choices)  # on a tie, take the earliest boundaries, so that all ranks divide alike

    stops = best(0, count)[2]
    return [range(start, stop) for start, stop in zip((0, *stops), stops, strict=False)]
