"""Documents that one command hands to another: a dataclass as JSON, with format, version, and a digest that shows edits."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

from console.files import read_json, shown, write_atomically

# Bounds of what a damaged or hostile file can make a reader build.
_MOST_ENTRIES = 1 << 21
_LONGEST_TEXT = 400

Content = TypeVar("Content")


@dataclass(frozen=True)
class FileKind(Generic[Content]):
    """A kind of file.

    Attributes:
        kind: dataclass of what it holds: texts, numbers, literals, and tuples, dictionaries and dataclasses of them.
        key: name of the field of the file that holds the content.
        format, version: of the file; a reader takes no other.
        noun, maker: the kind and the command that makes such files, for messages.
        largest_bytes: of a file that is read.
        remedy: what to do about a file that is refused.
        check: raises ``ValueError`` where parts of the content do not belong together.
    """

    kind: type[Content]
    key: str
    format: str
    version: int
    noun: str
    maker: str
    largest_bytes: int
    remedy: str
    check: Callable[[Content], None]

    def write(self, content: Content, path: Path) -> None:
        """Write the file whole or not at all. ``OSError`` where it cannot be written."""
        assert dataclasses.is_dataclass(content)
        body = dataclasses.asdict(content)  # pyright: ignore[reportArgumentType] an instance
        document = {"format": self.format, "version": self.version, "digest": _digest(body), self.key: body}
        # NaN and infinity are no JSON, though Python would read them back.
        write_atomically(path, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())

    def read(self, path: Path) -> Content:
        """Read and check a file. Raises ``ValueError``, in one line, where it is not what this version wrote."""
        document = read_json(path, self.largest_bytes, self.remedy)
        if not isinstance(document, dict) or document.get("format") != self.format:
            raise ValueError(f"{path}: no {self.noun}, expected a file of `{self.maker}`")
        if document.get("version") != self.version:
            found = shown(document.get("version"))
            raise ValueError(
                f"{path}: version {found}, expected {self.version}, as another release has it; {self.remedy}"
            )
        try:
            content = _decoded(self.kind, document.get(self.key), self.key)
            self.check(content)
        except ValueError as error:
            raise ValueError(f"{path}: {error}; {self.remedy}") from None
        # Asked last: what is wrong with the content says more than a digest that does not fit.
        if document.get("digest") != _digest(document[self.key]):
            raise ValueError(f"{path}: edited or damaged, its digest is of other content; {self.remedy}")
        return content


def _digest(body: dict[str, Any]) -> str:
    # Over sorted names without the file's white space, so that only a change of content changes it.
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _decoded(kind: Any, value: Any, where: str) -> Any:
    """``value``, as JSON has it, as an object of the type ``kind``; ``where`` names it in errors."""
    origin, arguments = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _decoded_object(kind, value, where)
    if origin is tuple:
        any_number = arguments[-1] is Ellipsis
        most = _MOST_ENTRIES if any_number else len(arguments)
        if not isinstance(value, list) or len(value) > most or (not any_number and len(value) < most):
            raise ValueError(f"{where} is no list of {'at most ' if any_number else ''}{most} entries")
        kinds = arguments[:1] * len(value) if any_number else arguments
        return tuple(
            _decoded(of, each, f"{where}[{place}]") for place, (of, each) in enumerate(zip(kinds, value, strict=True))
        )
    if origin is dict:
        if not isinstance(value, dict) or len(value) > _MOST_ENTRIES:
            raise ValueError(f"{where} is no object of at most {_MOST_ENTRIES} entries")
        return {
            _decoded(str, name, where): _decoded(arguments[1], each, f"{where}.{shown(name)}")
            for name, each in value.items()
        }
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{where} is {shown(value)}, expected one of {', '.join(map(str, arguments))}")
        return value
    if kind is str:
        if not isinstance(value, str) or len(value) > _LONGEST_TEXT:
            raise ValueError(f"{where} is no text of at most {_LONGEST_TEXT} letters")
        return value
    return _decoded_number(kind, value, where)


_hints = cache(get_type_hints)  # of a class; looking them up takes longer than to decode an object


def _decoded_object(kind: type, value: Any, where: str) -> Any:
    hints = _hints(kind)
    # Exactly the fields: another version of the class has another number in the file.
    if not isinstance(value, dict) or set(value) != set(hints):
        found = ", ".join(sorted(map(shown, value))) if isinstance(value, dict) else type(value).__name__
        raise ValueError(f"{where} has {shown(found)}, expected {', '.join(sorted(hints))}")
    return kind(**{name: _decoded(hint, value[name], f"{where}.{name}") for name, hint in hints.items()})


def _decoded_number(kind: type, value: Any, where: str) -> int | float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or abs(value) > 1e18 or not math.isfinite(value) or (kind is int and not isinstance(value, int)):
        raise ValueError(f"{where} is {shown(value)}, expected a {'whole' if kind is int else 'finite'} number")
    if value < 0 and not where.endswith(".numa"):  # -1: of no node, in /sys
        raise ValueError(f"{where} is {shown(value)}, expected no negative number")
    return kind(value)
