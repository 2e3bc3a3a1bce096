"""The table of ops: every row has a definition and functions, and definitions compute without any choice."""

import ast
from importlib.util import find_spec

import pytest
from torch import Tensor

import kernels
from kernels.ops import OPS, TABLE, op
from kernels.registry import Op
from tests.programs import REPOSITORY


def test_every_row_has_a_public_definition() -> None:
    assert list(OPS) == list(TABLE)
    for name in TABLE:
        assert isinstance(OPS[name], Op), f"no definition of {name} has the decorator op"
        assert getattr(kernels, name) is OPS[name]
        assert not isinstance(OPS[name].definition, Op)
        assert OPS[name].__doc__ == OPS[name].definition.__doc__


def test_a_definition_without_a_row_raises() -> None:
    def unlisted(x: Tensor) -> Tensor:
        return x

    with pytest.raises(ValueError, match=r"unlisted has no row in the table of kernels/ops\.py"):
        op(unlisted)
    assert "unlisted" not in OPS


def test_every_function_in_the_table_exists() -> None:
    """This needs neither apex nor flash-attn, because the adapters import them only when an op is called."""
    for name, row in TABLE.items():
        for implementation in row:
            if implementation.requires != "triton" or find_spec("triton"):
                for function in (name, implementation.reasons):
                    assert function is None or callable(implementation.function(function))


@pytest.mark.parametrize("module", ["ops", "lamb", "fp8"])
def test_definitions_call_other_definitions_instead_of_ops(module: str) -> None:
    """If a definition called an op, the op could choose the implementation that is compared with the definition."""
    tree = ast.parse((REPOSITORY / f"kernels/reference/{module}.py").read_text(encoding="utf-8"))
    plain = [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "definition"]
    used = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in OPS]
    assert used
    assert [f"{node.id} in line {node.lineno}" for node in used if node not in plain] == []
