"""Division of a model into stages of consecutive layers, so that the costliest one costs as little as can be."""

from dataclasses import dataclass
from functools import cache

from bert.configuration.sections import ModelConfig

_MASKED_SHARE = 0.15
"""Of the tokens: the rows that the heads read. BERT masks so many; the [CLS] tokens hardly count."""


@dataclass(frozen=True)
class Stage:
    """Consecutive layers of the model; the first stage has the embeddings too, the last one the heads."""

    index: int
    count: int
    """Stages of the model."""
    layers: range

    @property
    def is_first(self) -> bool:
        """Tell whether it embeds."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Tell whether it has the heads, and so the losses."""
        return self.index == self.count - 1

    def owns(self, name: str) -> bool:
        """Tell whether it is the stage that updates the parameter of this name."""
        match name.split("."):
            case ["embeddings", *_]:
                return self.is_first
            case ["layers", layer, *_]:
                return int(layer) in self.layers
        return self.is_last


def stages_of(config: ModelConfig, count: int) -> list[Stage]:
    """Divide a model into ``count`` stages."""
    return [Stage(index, count, layers) for index, layers in enumerate(divided(layer_costs(config), count))]


def layer_costs(config: ModelConfig) -> list[float]:
    """Multiply-adds of a token with the weights of each layer, those of the heads with the last one's.

    Attention adds the same to every layer. The last one computes keys and values of all tokens, and else the rows that the
    heads read; the embeddings multiply nothing.
    """
    hidden, wide = config.hidden_size, config.intermediate_size
    rows = _MASKED_SHARE * hidden * (2 * hidden + 2 * wide)  # query, attention output, fc1, fc2
    heads = _MASKED_SHARE * hidden * (hidden + config.vocab_size)  # transform, decoder
    layer = hidden * (4 * hidden + 2 * wide)  # query, key, value, attention output, fc1, fc2
    return [float(layer)] * (config.num_hidden_layers - 1) + [2 * hidden**2 + rows + heads]


def divided(costs: list[float], count: int) -> list[range]:
    """Divide a row of costs into ``count`` ranges, none empty, of the lowest highest sum; then of the least squares."""

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
        return min(choices)  # of equal ones the earliest stops, so that all ranks divide alike

    stops = best(0, count)[2]
    return [range(start, stop) for start, stop in zip((0, *stops), stops, strict=False)]
