"""Write a file atomically: the new file replaces the old file completely or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

FilePath = str | bytes | os.PathLike[str] | os.PathLike[bytes]

_BUFFER = 1 << 20


def atomic_write(path: FilePath, pieces: Iterable[bytes | memoryview]) -> None:
    """Write ``pieces`` to a temporary file, flush it to disk, and then rename it to ``path``.

    After an error, the old file at ``path`` is unchanged and no temporary file remains. A process that is killed can
    leave one temporary file, whose name starts with ``.tensordict_lite-``.

    Raises ``OSError`` if ``path`` exists and is not a regular file, or if the file cannot be written.
    """
    target = os.path.realpath(os.fsdecode(path))
    if os.path.exists(target) and not os.path.isfile(target):
        raise OSError(f"{os.fsdecode(path)!r} exists and is not a regular file, so it cannot be replaced")
    folder = os.path.dirname(target)
    os.stat(os.path.join(folder, ""))  # raises if it is no folder; a later error would name the temporary file
    replace_file(target, os.path.join(folder, f".tensordict_lite-{secrets.token_hex(8)}.tmp"), pieces)
    try:
        _sync_names_in(folder)
    except OSError as error:
        message = f"{error.strerror}; the new file is in place, and a crash of the machine may bring back the old file"
        raise OSError(error.errno, message, os.fsdecode(path)) from error


def sync_file(descriptor: int) -> None:
    """Flush an open file to disk. Raises ``OSError``; then the system may have dropped the bytes."""
    getattr(os, "fdatasync", os.fsync)(descriptor)  # fdatasync skips the time of the last change


def replace_file(
    target: str,
    temporary: str,
    pieces: Iterable[bytes | memoryview],
    folder: int | None = None,
    sync: Callable[[int], None] = sync_file,
) -> None:
    """Write ``pieces`` to a new file ``temporary``, flush the file to disk with ``sync``, and rename it to ``target``.

    ``folder``: the descriptor of the folder that the paths are relative to.

    After an error, ``target`` is unchanged and ``temporary`` does not exist.
    """
    try:
        # A new file, so no link is followed.
        with open(temporary, "xb", _BUFFER, opener=partial(os.open, mode=0o666, dir_fd=folder)) as file:
            file.writelines(pieces)
            with suppress(FileNotFoundError):
                mode = os.stat(target, dir_fd=folder).st_mode
                os.chmod(temporary, stat.S_IMODE(mode), dir_fd=folder)
            file.flush()
            sync(file.fileno())
        os.replace(temporary, target, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        # An interrupt may occur between any two steps, so remove the temporary file whether or not it exists.
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def make_folder(path: FilePath) -> bool:
    """Make a folder and the folders above it, and flush their names to disk. Returns False if it exists already."""
    name = os.path.abspath(os.fsdecode(path))
    missing = [one for one in (Path(name), *Path(name).parents) if not os.path.exists(one)]
    os.makedirs(name, exist_ok=True)
    for made in missing:
        _sync_names_in(str(made.parent))
    return bool(missing)


def _sync_names_in(folder: str) -> None:
    """Flush the names in a folder to disk. Raises the errors of `sync_folder`."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # Windows opens no folders
        return
    try:
        sync_folder(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(descriptor: int) -> None:
    """Flush the names in an open folder to disk. Raises ``OSError``, unless the file system cannot flush folders."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.EINVAL):  # as PostgreSQL does
            raise
