"""Memory kept for the backward pass: the cost model's formula is what is counted, and the count is autograd's own."""

from dataclasses import replace
from typing import get_args

import pytest
import torch

from benchmarks.training.recomputation import Layer, Precision, Storages, kept_bytes, times
from bert.configuration.sections import ModelConfig, Recompute
from cluster.model.recomputation import kept_bytes as predicted_bytes

LARGE = ModelConfig(num_hidden_layers=3, vocab_size=64)
ODD = replace(LARGE, hidden_size=192, intermediate_size=320, num_attention_heads=3)
MODES = get_args(Recompute)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("precision", get_args(Precision))
@pytest.mark.parametrize(("config", "length"), [(LARGE, 512), (ODD, 80)])
def test_bytes_of_the_gpus_kernels_are_the_cost_models(
    config: ModelConfig, length: int, precision: Precision, mode: Recompute
) -> None:
    pytest.importorskip("triton", reason="Triton, whose kernels keep what is counted, is not installed")
    assert kept_bytes(config, mode, precision, length, "gpu") == predicted_bytes(config, mode, precision, length)


def test_without_dropout_no_bits_are_kept() -> None:
    pytest.importorskip("triton", reason="Triton, whose kernels keep what is counted, is not installed")
    without = replace(ODD, attention_dropout=0.0)
    assert kept_bytes(without, "none", "bf16", 80, "gpu") == predicted_bytes(without, "none", "bf16", 80)
    assert predicted_bytes(without, "none", "bf16", 80) < predicted_bytes(ODD, "none", "bf16", 80)


def test_bytes_on_a_cpu() -> None:
    """Recomputation keeps as much as with the GPU's kernels; without it there are masks and, by length, probabilities."""
    found = {mode: kept_bytes(ODD, mode, "fp32", 80) for mode in MODES}
    assert found["selective"] == predicted_bytes(ODD, "selective", "fp32", 80)
    assert found["full"] == predicted_bytes(ODD, "full", "fp32", 80)
    probabilities = 3 * ODD.num_attention_heads * 80 * 4
    assert found["none"] == 4 * (10 * 192 + 2 * 320) + 16 + probabilities
    assert kept_bytes(ODD, "selective", "fp32", 40) == found["selective"]


def test_what_is_alive_is_what_autograd_saves() -> None:
    """Storages of the tensors that ``saved_tensors_hooks`` sees; of weights both see views, and drop out of a difference."""
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    layer = Layer(ODD, "none", "fp32", 80, 2)
    with Storages(layer.input_TD) as storages, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output_TD = layer.forward()
        kept = storages.alive() - output_TD.nbytes + layer.input_TD.nbytes
    weights = {each.untyped_storage().data_ptr(): each.nbytes for each in layer.layer.parameters()}
    views = sum(size for pointer, size in weights.items() if size > 4 * ODD.intermediate_size and pointer in saved)
    activations = sum(size for pointer, size in saved.items() if pointer not in weights)
    assert activations == kept - views > 0


def test_every_mode_is_timed() -> None:
    found = times("fp32", 512, 1, ODD)
    assert list(found) == list(MODES)
    assert all(len(seconds) == 1 and 0 < seconds[0] < 60 for seconds in found.values())
