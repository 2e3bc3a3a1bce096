"""Choice of the reduction when nothing needs to be measured."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch.distributed as dist

from bert.configuration.recipes import tiny_cpu
from bert.parallel.reduction.choice import choose
from bert.parallel.reduction.gradients import Communicators

GROUP = cast(dist.ProcessGroup, object())


def groups(node: bool = True, rail: bool = True) -> Communicators:
    return Communicators(GROUP if node or rail else None, GROUP if node else None, GROUP if rail else None, 4)


@pytest.mark.parametrize(
    ("reduction", "found", "line"),
    [
        ("hierarchical", groups(rail=False), "hierarchical (as set)"),
        ("sharded_world", groups(), "sharded_world (as set)"),
        ("sharded", groups(node=False, rail=False), "flat (one rank)"),
        ("auto", groups(node=False), "flat (one rank a host)"),
        ("auto", groups(rail=False), "flat (one host)"),
    ],
)
def test_a_choice_without_measuring_says_why(reduction: Any, found: Communicators, line: str) -> None:
    unused: Any = None
    assert str(choose(replace(tiny_cpu().training, reduction=reduction), unused, found)) == f"reduction: {line}"
