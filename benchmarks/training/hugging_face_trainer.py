"""Train a masked-LM model with Hugging Face's Trainer for ``own_text.py``, and write the accuracy over time."""

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import transformers
import tyro
from torch import Tensor

from benchmarks.training.hugging_face import new_model, padded
from benchmarks.training.own_text import BATCH, recipe_arguments
from bert.train import parse
from dataloading.dataset.folder import Dataset, open_dataset
from dataloading.text.vocabulary import Vocabulary


def main(data: Path, out: Path, samples: int, interval: int, rate: float, warmup_steps: int, seed: int) -> None:
    """Train on ``samples`` samples, evaluate every ``interval`` samples, and write [samples, seconds, accuracy] as JSON."""
    config = parse(recipe_arguments(data))
    transformers.set_seed(seed)
    # Eager attention is slightly faster than scaled-dot-product attention for a model of this size on a CPU.
    model = new_model(config.model, "AutoModelForMaskedLM", attention="eager")
    tokenizer = transformers.BertTokenizer(vocab=str(data / "vocab.txt"))
    unknown = Vocabulary.from_file(data / "vocab.txt").ids["[UNK]"]
    clock = Clock(model, evaluation_batches(open_dataset(data / "evaluation"), unknown), interval // BATCH)
    settings = transformers.TrainingArguments(
        output_dir=str(out.with_suffix("")),
        per_device_train_batch_size=BATCH,
        max_steps=samples // BATCH,
        learning_rate=rate,
        warmup_steps=warmup_steps,
        train_sampling_strategy="group_by_length",
        remove_unused_columns=False,  # keep special_tokens_mask for the collator
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        seed=seed,
    )
    transformers.Trainer(
        model,
        settings,
        train_dataset=training_examples(open_dataset(data / "train"), tokenizer.all_special_ids),
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer),
        callbacks=[clock],
    ).train()
    out.write_text(json.dumps(clock.curve), encoding="utf-8")


class Clock(transformers.TrainerCallback):
    """Clock that measures the time of training and stops during evaluations."""

    def __init__(self, model: torch.nn.Module, batches: list[dict[str, Tensor]], steps: int) -> None:
        """Evaluate every ``steps`` steps on padded ``batches``."""
        self.curve: list[tuple[int, float, float]] = []
        self._model, self._batches, self._steps = model, batches, steps
        self._began = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        accuracy(self._model, self._batches)  # warm-up
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if state.global_step % self._steps == 0:
            paused = time.perf_counter()
            found = accuracy(self._model, self._batches)
            self.curve.append((state.global_step * BATCH, paused - self._began, found))
            self._began += time.perf_counter() - paused


@torch.inference_mode()
def accuracy(model: torch.nn.Module, batches: list[dict[str, Tensor]]) -> float:
    """Return the share of masked tokens that the model predicts correctly."""
    model.eval()
    correct = count = 0
    for batch in batches:
        inputs, labels = batch.copy(), batch["labels"]
        del inputs["labels"]
        correct += int((model(**inputs).logits.argmax(-1) == labels).sum())
        count += int((labels >= 0).sum())
    model.train()
    return correct / count


def evaluation_batches(dataset: Dataset, ignored_id: int, size: int = 64) -> list[dict[str, Tensor]]:
    """Return all samples as padded batches with their stored masks. Masked tokens that were ``ignored_id`` get no label."""
    batches = []
    by_length = np.argsort(-dataset.lengths.astype(np.int64))
    for start in range(0, len(by_length), size):
        samples = dataset.take(by_length[start : start + size])
        batch = padded(samples, int(samples.lengths[0]))
        del batch["next_sentence_label"]
        batch["labels"][batch["labels"] == ignored_id] = -100
        batches.append(batch)
    return batches


def training_examples(dataset: Dataset, special_ids: list[int]) -> list[dict[str, list[int]]]:
    """Return all samples as they were before masking, because the collator draws a new mask for each batch."""
    examples = []
    for samples in dataset.blocks():
        ids, starts = samples.unmasked_ids, samples.sequence_offsets[:-1]
        special = np.isin(ids, special_ids).astype(np.int64)
        columns = {"input_ids": ids, "token_type_ids": samples.segment_ids, "special_tokens_mask": special}
        for start, stop in zip(starts.tolist(), samples.sequence_offsets[1:].tolist(), strict=True):
            examples.append({name: column[start:stop].tolist() for name, column in columns.items()})
    return examples


if __name__ == "__main__":
    tyro.cli(main)
