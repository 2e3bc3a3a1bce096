"""JSON files that one command writes for another: a dataclass with the file's format, version and digest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from console.files import read_bounded, shown, write_atomically

Content = TypeVar("Content")


@dataclass(frozen=True)
class FileKind(Generic[Content]):
    """A kind of file.

    Attributes:
        kind: dataclass of the content. It consists of texts, numbers, literals, tuples, dictionaries and dataclasses.
        format, version: written to the file. A file with another format or version is refused.
        noun, maker: name of the kind and the command that makes such files, for messages.
        largest_bytes: size of the largest file that is read.
        check: raises ``ValueError`` if parts of the content contradict each other.
    """

    kind: type[Content]
    format: str
    version: int
    noun: str
    maker: str
    largest_bytes: int
    check: Callable[[Content], None]

    def write(self, content: Content, path: Path) -> None:
        """Write the whole file or nothing. Raises ``OSError`` if it cannot be written, ``ValueError`` for NaN."""
        import msgspec  # takes time, and most commands read no such file

        body = msgspec.json.encode(content)
        msgspec.json.decode(body, type=self.kind)  # NaN is not JSON: it becomes null, which is refused here
        document = {
            "format": self.format,
            "version": self.version,
            "digest": hashlib.sha256(body).hexdigest(),
            "content": msgspec.Raw(body),
        }
        write_atomically(path, msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")

    def read(self, path: Path) -> Content:
        """Read and validate a file. Raises ``ValueError`` with one line if this version did not write it."""
        import msgspec

        remedy = f"run `{self.maker}` again"
        text = read_bounded(path, self.largest_bytes, remedy)
        try:
            document = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
            head = {name: msgspec.json.decode(document[name], type=Any) for name in ("format", "version", "digest")}
            if (head["format"], head["version"]) != (self.format, self.version):
                raise ValueError(f"{head['format']} {head['version']}, expected {self.format} {self.version}")
            # Without white space: only a change of the content changes the digest.
            body = msgspec.json.format(document["content"], indent=-1)
            if head["digest"] != hashlib.sha256(body).hexdigest():
                raise ValueError("edited or damaged, its digest belongs to other content")
            content = msgspec.json.decode(body, type=self.kind)
            self.check(content)
        except KeyError as error:
            raise ValueError(f"{path}: no {self.noun}, it lacks {error}; {remedy}") from None
        except (ValueError, msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"{path}: no {self.noun} ({shown(error)}); {remedy}") from None
        return content
