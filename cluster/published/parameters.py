"""Parameters of the cost model, each with its meaning and a prior that the fit to published results refines.

Positive quantities are stored as natural logarithms, so a standard deviation of 0.2 is about 20 %.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log

Parameters = Mapping[str, float]
"""Value of each parameter by name."""


@dataclass(frozen=True)
class Prior:
    """Normal distribution of a parameter before any result is seen, and the meaning of the parameter."""

    mean: float
    deviation: float
    meaning: str


BATCH_KNOTS = (448, 768, 1536, 3072, 4608, 16384)
"""Global batch sizes N at which the parameter ``practice_N`` corrects the reference convergence."""

PRIORS = {
    "matrix_efficiency": Prior(log(0.65), 0.2, "share of the peak rate that 16-bit matrix products reach"),
    "fp8_efficiency": Prior(log(0.75), 0.25, "share of that efficiency that 8-bit products keep"),
    "traffic": Prior(log(1.2e9), 0.4, "bytes of memory traffic of a sequence that no product hides"),
    "energy": Prior(log(1.1), 0.3, "joules of a sequence in 16 bits on an architecture of 2020"),
    "fp8_energy": Prior(log(0.65), 0.2, "energy of an 8-bit product over that of a 16-bit product"),
    "energy_halving": Prior(log(6.0), 0.4, "years in which the energy of a sequence halves"),
    "graphics_memory": Prior(0.2, 0.2, "slowdown of devices with GDDR memory"),
    "processor": Prior(log(0.2), 0.5, "speed of a CPU relative to an accelerator with the same data sheet"),
    "half_batch": Prior(log(1.5), 0.7, "sequences of a micro-batch that fill the device half"),
    "launch": Prior(log(5e-3), 0.6, "seconds of a micro-batch that do not depend on its size"),
    "fabric_efficiency": Prior(log(0.6), 0.3, "share of its bandwidth that NVLink or a similar fabric reaches"),
    "pcie_efficiency": Prior(log(0.4), 0.4, "share of its bandwidth that PCIe between devices reaches"),
    "network_efficiency": Prior(log(0.7), 0.25, "share of its bandwidth that a network port reaches"),
    "staging_efficiency": Prior(log(0.35), 0.25, "share of PCIe that reaches a port shared by several devices"),
    "network_latency": Prior(log(2e-4), 1.0, "seconds that each doubling of the nodes adds to a step"),
    "start": Prior(log(0.7), 0.7, "seconds from the start of the clock to the first full step"),
    "old_software": Prior(0.03, 0.03, "slowdown of the software of rounds up to v2.0"),
    "first_round": Prior(0.12, 0.05, "slowdown of a device in its first round"),
    "old_recipe": Prior(0.08, 0.04, "extra samples of the recipes of rounds up to v2.0"),
    "old_recipe_growth": Prior(0.03, 0.03, "extra samples that each doubling of the batch above 448 adds to that"),
    "accumulation": Prior(0.08, 0.05, "extra samples for each doubling of the batch beyond what memory holds"),
    "tuning": Prior(0.05, 0.03, "extra samples for each doubling of the run time above 17 minutes, for want of trials"),
} | {
    f"practice_{batch}": Prior(0.0, 0.02, f"samples in practice over the reference at a batch size of {batch}")
    for batch in BATCH_KNOTS
}

CHIP = Prior(0.0, 0.08, "speed of a chip relative to all of the above")
"""Prior of the parameter ``chip_NAME`` for each chip in the published results. For other chips the parameter is 0."""


def chip_parameter(chip: str) -> str:
    return f"chip_{chip}"


def prior_of(name: str) -> Prior:
    return PRIORS.get(name, CHIP)
