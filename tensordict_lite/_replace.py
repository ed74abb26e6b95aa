"""A file that is replaced whole or not at all."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import IO

_BUFFER = 1 << 20


@contextmanager
def replaced(path: str | os.PathLike[str]) -> Generator[IO[bytes]]:
    """A file that takes the place of ``path`` when it is whole and on the disk, or leaves no trace."""
    target = os.path.realpath(path)
    if os.path.exists(target) and not os.path.isfile(target):
        raise OSError(f"{os.fspath(path)!r} is there and is no regular file, so it cannot be replaced")
    folder = os.path.dirname(target)
    os.stat(os.path.join(folder, ""))  # raises for what is no folder; later the error would name the file beside
    beside = os.path.join(folder, f".{secrets.token_hex(8)}.tmp")
    file, named = _nameless(folder), False
    if file is None:
        file, named = open(beside, "xb", buffering=_BUFFER), True  # noqa: SIM115
    try:
        with file:
            yield file
            file.flush()
            with suppress(FileNotFoundError):
                os.chmod(file.fileno() if os.chmod in os.supports_fd else beside, stat.S_IMODE(os.stat(target).st_mode))
            os.fsync(file.fileno())
            if not named:
                named = _name(file, beside)
        os.replace(beside, target)
    except BaseException:
        if named:
            os.unlink(beside)
        raise
    with suppress(OSError):  # the new name is on the disk too, where a folder can be opened
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _nameless(folder: str) -> IO[bytes] | None:
    """A new file in ``folder`` without a name, of which nothing is left if the process is killed; None without such."""
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o666)
    except (AttributeError, OSError):  # not Linux, or not this file system
        return None
    if not os.path.exists(f"/proc/self/fd/{descriptor}"):
        os.close(descriptor)
        return None
    return open(descriptor, "wb", buffering=_BUFFER)


def _name(file: IO[bytes], path: str) -> bool:
    # With a folder's descriptor, which is not needed for the path: only then does Python ask to follow the link.
    folder = os.open(os.path.dirname(path), getattr(os, "O_PATH", os.O_RDONLY))
    try:
        os.link(f"/proc/self/fd/{file.fileno()}", path, src_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)
    return True
