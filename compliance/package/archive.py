"""Pack a submission for upload: a compressed tar, encrypted with a password, and its SHA-1 (SR "How to Submit").

The encryption is that of the `openssl` command, `aes-256-cbc` with its default key derivation, because that is what the
receiving side decrypts with. The derivation is weak: what protects the archive is a long random password.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tarfile
from contextlib import suppress
from functools import partial
from io import BufferedRandom
from pathlib import Path
from typing import IO

from compliance.artefact import write_whole
from console.files import atomic_path

MIN_PASSWORD_CHARACTERS = 16
TIMEOUT_S = 600


def check_request(archive: Path, password_file: Path) -> None:
    """Refuse an archive that could not be written, before the work begins.

    Raises:
        ValueError: it is there already, the password is no good, or there is no openssl.
    """
    for path in (archive, _sum_of(archive)):
        if path.exists():
            raise ValueError(f"{path} is there already: choose another --archive, or move it away")
    try:
        # openssl takes the first line of the file for the password, so that line is what must be long.
        password = password_file.read_text("utf-8").split("\n", 1)[0]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{password_file}: no password can be read from it: {error}") from error
    if len(password) < MIN_PASSWORD_CHARACTERS:
        raise ValueError(
            f"{password_file}: its first line has {len(password)} characters, expected a password of at least "
            f"{MIN_PASSWORD_CHARACTERS}, such as `openssl rand -hex 24` prints"
        )
    if shutil.which("openssl") is None:
        raise ValueError("there is no openssl command, which encrypts the archive: install it, or leave out --archive")


def write_archive(tree: Path, archive: Path, password_file: Path) -> str:
    """Write the encrypted archive of `tree` and, beside it, <archive>.sha1 as `sha1sum` writes it.

    Decrypt with: openssl aes-256-cbc -d -pass file:PASSWORD_FILE -in ARCHIVE | tar xz

    Returns:
        The SHA-1 of the archive.

    Raises:
        ValueError: see `check_request`, or it cannot be written.
    """
    # Again, because much time has passed since the command looked.
    check_request(archive, password_file)
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
        # Readable too: the sum is taken over what was written, before the archive has its name.
        with atomic_path(archive) as aside, aside.open("x+b") as file:
            _encrypt(tree, file, password_file)
            digest = _sha1(file)
        write_whole(_sum_of(archive), f"{digest}  {archive.name}\n")
    except OSError as error:
        raise ValueError(f"{archive} cannot be written: {error.strerror}; choose another --archive") from error
    return digest


def _sha1(file: BufferedRandom) -> str:
    file.seek(0)
    # SHA-1 is what the rules ask for; Python with FIPS refuses it where it is not said to guard nothing.
    return hashlib.file_digest(file, partial(hashlib.sha1, usedforsecurity=False)).hexdigest()


def _sum_of(archive: Path) -> Path:
    return archive.with_name(f"{archive.name}.sha1")


def _encrypt(tree: Path, target: IO[bytes], password_file: Path) -> None:
    # No -pbkdf2: the receiving side decrypts without it.
    command = ["openssl", "aes-256-cbc", "-e", "-salt", "-pass", f"file:{password_file}"]
    # It writes into the file itself, so that no archive passes through this process.
    openssl = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=target, stderr=subprocess.PIPE)
    assert openssl.stdin
    try:
        # If openssl ends early its status says why, and not the broken pipe. "w|gz" writes a stream, as a pipe cannot
        # seek.
        with suppress(BrokenPipeError), openssl.stdin as pipe, tarfile.open(fileobj=pipe, mode="w|gz") as tar:
            tar.add(tree, arcname=tree.name, filter=_anonymous)
        openssl.stdin = None  # closed: communicate() would flush it
        _, said = openssl.communicate(timeout=TIMEOUT_S)
    except BaseException:  # also Ctrl-C: no openssl stays behind
        openssl.kill()
        openssl.wait()
        raise
    if openssl.returncode != 0:
        reason = said.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise ValueError(f"{tree}: openssl did not write the archive: {reason}")


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Drop the owner of a member: who packed it on which machine is nobody's business."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
