"""JSON files of a known type. A file that one command writes for another states its format, version and digest."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from console.files import read_bounded, shown, write_atomically

Content = TypeVar("Content")


def read_typed(path: Path, kind: type[Content], limit: int, remedy: str) -> Content:
    """Read a JSON file of at most ``limit`` bytes as ``kind``, a dataclass or struct. Unknown fields are ignored.

    Raises ``ValueError`` if the file cannot be read or is of another type. The message is one line and ends with ``remedy``.
    """
    try:
        return msgspec.json.decode(read_bounded(path, limit, remedy), type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {shown(error)}; {remedy}") from None


class _Document(msgspec.Struct):
    format: str
    version: int
    digest: str
    content: msgspec.Raw


@dataclass(frozen=True)
class FileKind(Generic[Content]):
    """Format of a file that one command writes and another reads.

    Attributes:
        kind: dataclass of the content. It consists of texts, numbers, literals, tuples, dictionaries and dataclasses.
        format, version: written to the file. A file with another format or version is refused.
        noun, maker: name of the kind and the command that makes such files, for messages.
        largest_bytes: size of the largest file that is read.
        check: function that raises ``ValueError`` if parts of the content contradict each other.
    """

    kind: type[Content]
    format: str
    version: int
    noun: str
    maker: str
    largest_bytes: int
    check: Callable[[Content], None]

    def write(self, content: Content, path: Path) -> None:
        """Write the whole file or nothing. Raises ``OSError`` if it cannot be written, and ``ValueError`` if it has NaN."""
        body = msgspec.json.encode(content)
        msgspec.json.decode(body, type=self.kind)  # raises an error for NaN, which msgspec writes as null
        document = _Document(self.format, self.version, hashlib.sha256(body).hexdigest(), msgspec.Raw(body))
        write_atomically(path, msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")

    def read(self, path: Path) -> Content:
        """Read and validate a file.

        Raises ``ValueError``, in one line, if the file is damaged, edited, or of another format or version.
        """
        remedy = f"run `{self.maker}` again"
        text = read_bounded(path, self.largest_bytes, remedy)
        try:
            document = msgspec.json.decode(text, type=_Document)
            if (document.format, document.version) != (self.format, self.version):
                found, expected = f"{document.format} {document.version}", f"{self.format} {self.version}"
                raise ValueError(f"its format is {found}, expected {expected}")
            # Remove white space first, so that a reformatted file keeps its digest.
            body = msgspec.json.format(document.content, indent=-1)
            if document.digest != hashlib.sha256(body).hexdigest():
                raise ValueError("edited or damaged: its content does not match its digest")
            content = msgspec.json.decode(body, type=self.kind)
            self.check(content)
        except (ValueError, msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"{path}: not a valid {self.noun} ({shown(error)}); {remedy}") from None
        return content
