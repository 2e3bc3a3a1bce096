"""Data-sheet figures of accelerators, and recognition of accelerators by name."""

import csv

import pytest

from cluster.devices import device_named, devices
from cluster.published.results import TABLE

NOT_DESCRIBED = {"TPU-v4", "Graphcore Bow IPU", "Habana Gaudi", "N/A"}
"""Accelerators in published results that have no entry in devices.toml."""


def test_rates_are_dense_links_one_way_and_names_unique() -> None:
    for device in devices():
        if device.fp8_tflops is not None:
            assert 1.9 < device.fp8_tflops / device.bf16_tflops < 2.1, device.name
        assert 0 < device.bf16_tflops < 2600
        assert 0 < device.link_gb_s <= 900
        assert 0.5 < device.memory_gb_s / 1000 < 10 or device.form in ("PCIe", "CPU"), device.name
        assert device.source.strip()
        assert device_named(device.name) is device


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe-80GB"),
        ("NVIDIA A100-SXM4-80GB (400W)", "A100-SXM-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM-40GB"),
        ("NVIDIA A100 - PCIe - 80 GB", "A100-PCIe-80GB"),
        ("NVIDIA GB200", "GB200-186GB"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
        ("Intel\u00ae Gaudi\u00ae 2 AI accelerator", "Gaudi2"),
        ("NVIDIA B200-SXM-192GB", "B200-SXM-180GB"),
        ("CPU", "Xeon-8480+"),
    ],
)
def test_names_in_use_are_recognised(name: str, device: str) -> None:
    assert device_named(name).name == device


def test_published_accelerators_are_known_or_named_here() -> None:
    with TABLE.open(encoding="utf-8", newline="") as file:
        names = {row["accelerator"] for row in csv.DictReader(file)}
    for name in names - NOT_DESCRIBED:
        device_named(name)


@pytest.mark.parametrize(("name", "nearest"), [("NVIDIA H1000", "H100"), ("A100X", "A100"), ("", "")])
def test_an_unknown_name_is_refused_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=rf"unknown; nearest: .*{nearest}.*`python -m cluster devices`") as error:
        device_named(name)
    assert len(str(error.value)) < 500
