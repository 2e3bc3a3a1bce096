"""Saved weights come back, and a file that does not fit is refused with one clear line."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bert.checkpoint import copy_weights, load_weights, save_weights
from bert.config import ModelConfig
from bert.model import BertForPreTraining, initialize_
from bert.optimizer import FlatParameters

CONFIG = ModelConfig(2, 8, 2, 16, 30, 12)


def random_model(seed: int, config: ModelConfig = CONFIG) -> BertForPreTraining:
    model = BertForPreTraining(config)
    initialize_(model, torch.Generator().manual_seed(seed))
    return model


def equal(one: BertForPreTraining, other: BertForPreTraining) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    save_weights(random_model(0), path)
    return path


def test_round_trip(saved: Path):
    model = random_model(1)
    assert not equal(model, random_model(0))
    load_weights(model, saved)
    assert equal(model, random_model(0))


def test_round_trip_through_flat_buffers(tmp_path: Path):
    """Parameters that are views of one buffer are saved as themselves and loaded into the buffer."""
    path = tmp_path / "new folder" / "weights.safetensors"
    source, target = random_model(0), random_model(1)
    FlatParameters.of(source)
    save_weights(source, path)
    flat = FlatParameters.of(target)
    load_weights(target, path)
    assert equal(target, random_model(0))
    assert torch.equal(flat.weights_P, FlatParameters.of(random_model(0)).weights_P)
    parameters = sum(parameter.numel() for parameter in source.parameters())
    assert 4 * parameters < path.stat().st_size < 4 * parameters + 10_000


def test_metadata_and_overwriting(saved: Path):
    save_weights(random_model(2), saved, {"recipe": "small"})
    model = random_model(3)
    load_weights(model, saved)
    assert equal(model, random_model(2))
    assert b'"recipe":"small"' in saved.read_bytes()


def test_a_reader_keeps_the_file_that_it_opened(saved: Path):
    before = saved.read_bytes()
    with saved.open("rb") as reader:
        save_weights(random_model(2), saved)
        assert reader.read() == before


def test_missing_file(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no checkpoint at .*set data\.initial_checkpoint"):
        load_weights(random_model(0), tmp_path / "absent.safetensors")


@pytest.mark.parametrize(
    "kept", [0, 4, 100, -1], ids=["empty", "part of the length", "part of the header", "last byte"]
)
def test_truncated_file(saved: Path, kept: int):
    saved.write_bytes(saved.read_bytes()[:kept])
    model = random_model(1)
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load_weights(model, saved)
    assert equal(model, random_model(1))


def test_file_of_another_kind(tmp_path: Path):
    path = tmp_path / "pickle.safetensors"
    torch.save(random_model(0).state_dict(), path)
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load_weights(random_model(1), path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 3}, r"lacks layers\.2\..*another architecture"),
        ({"num_hidden_layers": 1}, r"unknown tensor layers\.1\..*another architecture"),
        ({"vocab_size": 31}, r"holds .* of shape \(30.*asks for \(31"),
        ({"hidden_size": 16}, r"of shape .* but the model section asks for"),
        ({"max_position_embeddings": 6}, r"embeddings\.position of shape \(12, 8\).*asks for \(6, 8\)"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_another_architecture_changes_nothing(saved: Path, change: dict[str, int], message: str):
    config = replace(CONFIG, **change)
    model = random_model(1, config)
    with pytest.raises(ValueError, match=message):
        load_weights(model, saved)
    assert equal(model, random_model(1, config))


def test_missing_tensor(saved: Path):
    tensors = load_file(saved)
    del tensors["pooler.bias"]
    save_file(tensors, saved)
    with pytest.raises(ValueError, match=r"weights\.safetensors lacks pooler\.bias"):
        load_weights(random_model(1), saved)


def test_tensor_of_another_type(saved: Path):
    tensors = load_file(saved)
    tensors["pooler.bias"] = tensors["pooler.bias"].to(torch.int32)
    with pytest.raises(ValueError, match=r"pooler\.bias .*int32.*expected floating point"):
        copy_weights(random_model(1), tensors, "the checkpoint")


def test_half_precision_weights_are_read(saved: Path):
    tensors = {name: tensor.half() for name, tensor in load_file(saved).items()}
    save_file(tensors, saved)
    model = random_model(1)
    load_weights(model, saved)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    torch.testing.assert_close(model.pooler.weight, random_model(0).pooler.weight, rtol=1e-3, atol=1e-6)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(saved: Path, monkeypatch: pytest.MonkeyPatch):
    before = saved.read_bytes()

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_weights(random_model(2), saved)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]
