"""Derivation of default settings of ``own_text_cpu`` from the data, the vocabulary and the initial weights."""

from collections.abc import Callable
from dataclasses import replace

from bert.configuration.config import Config

_MOST_EVALUATIONS = 20
_EVALUATION_SHARE = 0.1
"""Share of a run's time that its evaluations may take."""
EVALUATION_COST = 0.4
"""Time to evaluate a sample, as a share of the time to train on one. It is below 1, as there is no backward pass."""
_FEWEST_STEPS = 1000
"""Minimum number of steps when training starts from random weights. A model of this size learns little in fewer steps."""


def _learning_rate(hidden_size: int) -> float:
    """Return a learning rate for LAMB: 0.01 up to a hidden size of 128, falling to 0.00063 for BERT-Large.

    At a hidden size of 128, a rate of 0.005 learned less in the same time, 0.02 did not learn more, and 0.04 diverged. For
    BERT-Large, the rate is less than twice the published rates for small batches.
    """
    return 0.01 * min(1.0, 128 / hidden_size) ** (4 / 3)


def affordable_samples(budget: float, held_out: int) -> int:
    """Return the number of samples to train on, so that training and evaluations together take the time ``budget``.

    The unit of the budget is the time to train on one sample. An evaluation takes ``held_out`` samples.
    """
    most = _MOST_EVALUATIONS * EVALUATION_COST * held_out
    return int(max(budget / (1 + _EVALUATION_SHARE), budget - most))


def _from_the_data(config: Config) -> Config:
    """Set the model, the learning rate and the number of training samples from the data and the initial checkpoint."""
    # These imports are slow, and most commands do not need them.
    from dataloading.dataset.folder import MANIFEST_NAME, open_dataset
    from dataloading.text.vocabulary import Vocabulary

    data, training = config.data, config.training
    # Ignore missing data here: preflight reports it, and an evaluation needs no training set.
    there = [folder for folder in (data.train, data.evaluation) if (folder / MANIFEST_NAME).is_file()]
    if not there:
        return config
    sets = {folder: open_dataset(folder) for folder in there}
    vocab_size = Vocabulary.read(data.vocab).size
    steps = -(-len(sets[data.train]) // training.global_batch_size) if data.train in sets else 0
    if data.initial_checkpoint is None:
        longest = max(dataset.info.max_seq_length for dataset in sets.values())
        model = replace(config.model, vocab_size=vocab_size, max_position_embeddings=longest)
        steps = max(steps, _FEWEST_STEPS)
    else:
        from bert.checkpoints.sources import open_source  # imports PyTorch, which takes more than a second

        # Use the vocabulary's size: the checkpoint's word embedding table may have padding, which is dropped during loading.
        model = replace(open_source(data.initial_checkpoint, whole=False).model, vocab_size=vocab_size)
    optimizer = replace(config.optimizer, base_learning_rate=_learning_rate(model.hidden_size))
    training = replace(training, max_samples=max(steps, 1) * training.global_batch_size)
    return replace(config, model=model, optimizer=optimizer, training=training)


def _from_the_length(config: Config) -> Config:
    """Set the evaluation interval so that the last step is evaluated, and a learning rate schedule that reaches 0 there."""
    from dataloading.dataset.folder import MANIFEST_NAME, open_dataset

    batch = config.training.global_batch_size
    steps = -(-config.training.sample_limit // batch)
    evaluations = min(_MOST_EVALUATIONS, steps, batch)
    if (config.data.evaluation / MANIFEST_NAME).is_file():
        affordable = _EVALUATION_SHARE * steps * batch / (EVALUATION_COST * len(open_dataset(config.data.evaluation)))
        evaluations = max(1, min(evaluations, int(affordable)))
    return replace(
        config,
        optimizer=replace(config.optimizer, learning_rate_training_steps=steps, num_warmup_steps=min(100, steps // 10)),
        evaluation=replace(config.evaluation, interval_samples=steps * batch // evaluations),
    )


DERIVATIONS: dict[str, tuple[Callable[[Config], Config], ...]] = {"own_text_cpu": (_from_the_data, _from_the_length)}
"""Map from recipes to the functions that derive their default settings."""
