"""Parameters of the cost model: what each one means, and what is held of it before a published result is looked at.

All are logarithms where a quantity is positive by nature, so that a standard deviation of 0.2 is about 20 %.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log

Parameters = Mapping[str, float]
"""Value of each parameter by name."""


@dataclass(frozen=True)
class Prior:
    """Belief about a parameter before any result is seen.

    Attributes:
        mean, deviation: of a normal distribution.
        meaning: of the parameter, with its unit.
    """

    mean: float
    deviation: float
    meaning: str


BATCH_KNOTS = (448, 768, 1536, 3072, 4608, 16384)
"""Global batch sizes between which practice is interpolated against the reference, in the logarithm of the size."""

PRIORS = {
    "matrix_efficiency": Prior(
        log(0.65), 0.2, "log of the share of the peak rate that matrix products reach in 16 bits"
    ),
    "fp8_efficiency": Prior(log(0.75), 0.25, "log of the further share of it that they reach in 8 bits"),
    "traffic": Prior(log(1.2e9), 0.4, "log of the bytes of memory traffic of a sequence that no product hides"),
    "energy": Prior(log(1.1), 0.3, "log of the joules of a sequence in 16 bits on an architecture of 2020"),
    "fp8_energy": Prior(log(0.65), 0.2, "log of the share of that energy which a product in 8 bits needs"),
    "energy_halving": Prior(log(6.0), 0.4, "log of the years in which the energy of a sequence halves"),
    "graphics_memory": Prior(0.2, 0.2, "log of how much slower devices with GDDR memory are than the above says"),
    "processor": Prior(log(0.2), 0.5, "log of the share of the above that a CPU reaches"),
    "half_batch": Prior(log(1.5), 0.7, "log of the sequences of a micro-batch that fill the device half"),
    "launch": Prior(log(5e-3), 0.6, "log of the seconds of a micro-batch that do not depend on its size"),
    "fabric_efficiency": Prior(log(0.6), 0.3, "log of the share of its bandwidth that NVLink or its like reaches"),
    "pcie_efficiency": Prior(log(0.4), 0.4, "log of the share of its bandwidth that PCIe between devices reaches"),
    "network_efficiency": Prior(log(0.7), 0.25, "log of the share of its bandwidth that a network port reaches"),
    "staging_efficiency": Prior(log(0.35), 0.25, "log of the share of PCIe that reaches a port several devices share"),
    "network_latency": Prior(log(2e-4), 1.0, "log of the seconds that each doubling of the nodes adds to a step"),
    "start": Prior(log(0.7), 0.7, "log of the seconds from the start of the clock to the first full step"),
    "old_software": Prior(0.03, 0.03, "log of how much slower the software of round v2.0 is"),
    "first_round": Prior(0.12, 0.05, "log of how much slower a device's first round is than later ones"),
    "old_recipe": Prior(0.08, 0.04, "log of how many more samples the recipes of round v2.0 need"),
    "old_recipe_growth": Prior(0.03, 0.03, "what each doubling of the batch above 448 adds to it"),
    "accumulation": Prior(0.08, 0.05, "log of the samples that each doubling of the batch above the memory costs"),
    "tuning": Prior(
        0.05, 0.03, "log of the samples that each doubling of the run above 17 minutes costs, for want of trials"
    ),
} | {
    f"practice_{batch}": Prior(0.0, 0.02, f"log of the samples in practice over the reference at a batch of {batch}")
    for batch in BATCH_KNOTS
}

CHIP = Prior(0.0, 0.08, "log of how much faster a chip is than all of the above says")
"""Prior of the parameter `chip_NAME` that each chip in the table of published results has; others have 0."""


def chip_parameter(chip: str) -> str:
    """Name of a chip's own parameter."""
    return f"chip_{chip}"


def prior_of(name: str) -> Prior:
    """Return what is held of a parameter beforehand."""
    # Any other name is that of a chip.
    return PRIORS.get(name, CHIP)
