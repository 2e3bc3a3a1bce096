"""Reader for the header of a safetensors file."""

from __future__ import annotations

from pathlib import Path


def read_header(path: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Read the shapes by name, and the metadata. The file's size must match its header.

    Raises:
        ValueError: the file is missing, truncated, or not a safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():  # opening a pipe would wait for a writer
        raise ValueError(f"{path}: no such file")
    try:
        # The framework matters only for reading tensors, and none is read here.
        with safe_open(path, "numpy") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            return shapes, file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}): fetch or make it again") from error
