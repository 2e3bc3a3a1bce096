"""BERT-Large with five layers, of which a step is traced in two seconds: first, two equal ones, last inner one, and last."""

from bert.configuration.sections import ModelConfig
from cluster.budget.launches import StepLaunch, step_launches

MODEL = ModelConfig(num_hidden_layers=5)
SEQUENCES = 64
MULTIPROCESSORS = 132


def launches(
    precision: str, sequences: int = SEQUENCES, multiprocessors: int = MULTIPROCESSORS
) -> tuple[StepLaunch, ...]:
    return step_launches(precision, sequences, multiprocessors, MODEL)
