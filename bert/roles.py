"""Roles of the micro-batches of a step, besides their forward and backward passes."""

from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True)
class Role:
    """Role of a micro-batch."""

    gathers_weights: bool
    """The first of a step: weights of a sharded optimizer come while its forward pass runs."""
    reduces_gradients: bool
    """The last of a step: buckets of gradients are summed over the ranks as its backward pass fills them. Sharded gradients
    are so with every micro-batch, and the sums are complete after this one."""
    overwrites_gradients: bool
    """The first of a step: products write gradients of weights over those of the step before."""


ROLES = [Role(*duties) for duties in product((False, True), repeat=3)]


def roles_of(count: int, gathers: bool, reduces: bool, overwrites: bool) -> list[Role]:
    """Return the roles of so many micro-batches, in their order, in a run that has these duties at all."""
    return [
        Role(gathers and place == 0, reduces and place == count - 1, overwrites and place == 0)
        for place in range(count)
    ]
