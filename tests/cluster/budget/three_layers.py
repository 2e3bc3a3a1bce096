"""BERT-Large with three layers: two inner ones, which are equal, and the last; a step of it is traced in a second."""

from bert.configuration.config import ModelConfig
from cluster.budget.launches import StepLaunch, step_launches

MODEL = ModelConfig(num_hidden_layers=3)
SEQUENCES = 64
MULTIPROCESSORS = 132


def launches(
    precision: str, sequences: int = SEQUENCES, multiprocessors: int = MULTIPROCESSORS
) -> tuple[StepLaunch, ...]:
    return step_launches(precision, sequences, multiprocessors, MODEL)
