"""All configurations compile for all architectures without significant spills. Kernels that do not fit are detected."""

import importlib.util
import json
from typing import Any

import pytest

from tests.kernels.compiled import Cost
from tests.programs import REPOSITORY, python

pytestmark = [  # the oldest supported PyTorch comes with Triton 3.6
    pytest.mark.slow,
    pytest.mark.oldest_torch,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Return the results of a new process, in which Triton compiles instead of interpreting kernels."""
    program = (
        "import json, triton; from dataclasses import asdict; from tests.kernels import compiled, faulty_kernels; "
        "costs, lacking = compiled.known_costs(); "
        "fat = compiled.costs_of(compiled.items_of('faulty', faulty_kernels.configurations(), (90,))); "
        "costs = {'costs': [asdict(cost) for cost in costs.values()], 'fat': [asdict(cost) for cost in fat]}; "
        "others = {'lacking': lacking, 'specialized': compiled.specialized(), 'triton': triton.__version__}; "
        "print(json.dumps(costs | others))"
    )
    done = python("-c", program, TRITON_INTERPRET=None)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_configuration_compiles_and_fits_without_significant_spills(found: dict[str, Any]) -> None:
    costs = [Cost(**cost) for cost in found["costs"]]
    assert {cost.module for cost in costs} == {
        ".".join(path.relative_to(REPOSITORY / "kernels/triton").with_suffix("").parts)
        for path in (REPOSITORY / "kernels/triton").rglob("[a-z]*.py")
        if "def configurations(" in path.read_text()
    }
    assert {cost.capability for cost in costs} == {80, 90, 100}
    assert len({(cost.kernel, cost.configuration, cost.capability) for cost in costs}) == len(costs)
    assert not [cost for cost in costs if not cost.fits]
    if not found["triton"].startswith("3.6."):
        assert not [cost for cost in costs if cost.spilled]
    assert all(0 < cost.registers <= 255 for cost in costs)
    attention = [cost for cost in costs if cost.module == "attention.launches"]
    assert all(cost.in_flight >= 2 for cost in attention), "a tile is on its way while one is computed with"
    # Devices with capability 8.6, 8.9 or 12.0 use the configurations for 8.0 and 9.0 but have only 99 KiB per block.
    assert all(cost.shared <= 99 * 1024 for cost in attention)


def test_kernels_use_the_fast_instructions_of_each_gpu_generation(found: dict[str, Any]) -> None:
    """Check for each generation's tensor-core instructions, asynchronous copies and 16-byte memory accesses."""
    costs = [(Cost(**cost), set(cost["instructions"].split())) for cost in found["costs"]]
    products = {80: "mma", 90: "wgmma", 100: "tcgen05"}
    for cost, kinds in costs:
        expected = {products[cost.capability]} if cost.kernel.startswith("attention_") else set()
        assert kinds & set(products.values()) == expected, cost
        assert not expected or kinds & {"cp.async", "TMA"}, cost
    assert {(cost.module, cost.kernel) for cost, kinds in costs if "f64" in kinds} == {
        ("squares", "_kernel"),  # slow fp64 does not matter here: memory limits the norm's speed
        ("lamb", "squares_kernel"),
    }
    assert {cost.kernel for cost, kinds in costs if "vectors" not in kinds} == {"squares_kernel"}, "of partial sums"
    assert all(("satfinite" in kinds) == cost.module.endswith("fp8") for cost, kinds in costs), "no clamp comes before"


def test_no_register_changes_while_a_product_still_uses_it(found: dict[str, Any]) -> None:
    costs = [Cost(**cost) for cost in found["costs"]]
    assert not [(cost, cost.hazards) for cost in costs if cost.hazards]
    walked = [cost for cost in costs if cost.products]
    assert walked == [cost for cost in costs if cost.capability == 90 and cost.kernel.startswith("attention_")]
    assert {words for cost in walked for words in cost.configuration.split(", ")} >= {"casts", "fp16", "E = 16"}


def test_the_file_of_costs_has_every_configuration(found: dict[str, Any]) -> None:
    assert found["lacking"] == [], "run python -m tests.kernels.compiled, which adds them to the file"


def test_kernels_are_not_specialized_on_token_counts(found: dict[str, Any]) -> None:
    """Triton may specialize kernels on numbers of the model or the device, but not on token counts, which vary."""
    places = [name.partition(": ") for name in found["specialized"]]
    of_the_model = {"columns", "width", "programs", "vocabulary", "ignore_index", "adapted", "chunks"}
    assert {name for module, _, name in places if module not in ("fp8", "squares")} <= of_the_model


def test_a_kernel_that_spills_does_not_fit(found: dict[str, Any]) -> None:
    (spilling,) = (Cost(**cost) for cost in found["fat"])
    assert spilling.spilled > 50
    assert not spilling.fits
