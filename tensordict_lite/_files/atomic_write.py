"""A file that is replaced whole or not at all."""

from __future__ import annotations

import os
import platform
import secrets
import stat
from collections.abc import Iterable
from contextlib import suppress
from hashlib import blake2b
from typing import IO, Any, cast

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

FilePath = str | bytes | os.PathLike[str] | os.PathLike[bytes]

_BUFFER = 1 << 20
_PREFIX = f".tensordict_lite-{blake2b(platform.node().encode(), digest_size=4).hexdigest()}-"
"""Of temporary names. With the machine's name, as the locks of some network file systems hold on one machine only."""
_SUFFIX = ".tmp"
_swept: set[tuple[int, str]] = set()
"""The folders that a process has swept. Once is enough for what others left, and a folder may hold many files."""
_MOST_SWEPT = 1000


def atomic_write(path: FilePath, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a file of these pieces, which takes the place of ``path`` when it is whole and on the disk.

    If anything fails, what was at ``path`` is still there and nothing else is left. A process that is killed can leave
    a temporary file, where there are no files without names, or in the moment in which an older file is replaced.
    Nobody else holds the lock of such a file then, and the first `atomic_write` of a process in that folder removes it.
    """
    target = os.path.realpath(os.fsdecode(path))
    if os.path.exists(target) and not os.path.isfile(target):
        raise OSError(f"{os.fsdecode(path)!r} is there and is no regular file, so it cannot be replaced")
    folder = os.path.dirname(target)
    os.stat(os.path.join(folder, ""))  # raises for what is no folder; later the error would name the file beside
    _sweep(folder)
    beside = _temporary(folder)
    file: IO[bytes] | None = None
    try:
        file = _nameless(folder)
        named = file is None
        while file is None:
            beside = _temporary(folder)
            file = _new(beside)
        file.writelines(pieces)
        file.flush()
        with suppress(FileNotFoundError):
            os.chmod(file.fileno() if os.chmod in os.supports_fd else beside, stat.S_IMODE(os.stat(target).st_mode))
        os.fsync(file.fileno())
        if named or not _link(file, target):
            if not named:
                _lock(file)
                _link(file, beside)
            if fcntl is None:
                file.close()  # Windows renames no open file; elsewhere the lock is held until the file has its name
            os.replace(beside, target)
        file.close()
    except BaseException:
        # An interrupt may come between any two steps, so what was done is not known but looked for.
        with suppress(OSError):
            os.unlink(beside)
        if file is not None:
            cast(Any, file).raw.close()  # without a flush, whose error would hide this one
        raise
    with suppress(OSError):  # the new name is on the disk too, where a folder can be opened
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _temporary(folder: str) -> str:
    return os.path.join(folder, f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}")


def _nameless(folder: str) -> IO[bytes] | None:
    """A new file in ``folder`` without a name, of which nothing is left if the process is killed; None without such."""
    try:
        file = open(folder, "wb", buffering=_BUFFER, opener=_open_nameless)  # noqa: SIM115
    except (AttributeError, OSError):  # not Linux, or not this file system
        return None
    if os.path.exists(f"/proc/self/fd/{file.fileno()}"):
        return file
    file.close()
    return None


def _open_nameless(folder: str, _: int) -> int:
    return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)


def _new(path: str) -> IO[bytes] | None:
    """A new file at ``path``, locked; None if somebody who sweeps has locked it first, and so removes it."""
    file = open(path, "xb", buffering=_BUFFER)  # noqa: SIM115
    if _lock(file) and os.fstat(file.fileno()).st_nlink:
        return file
    file.close()
    return None


def _lock(file: IO[bytes]) -> bool:
    """Lock an open file until it is closed; False if somebody else has locked it. True where there are no locks."""
    if fcntl is not None:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # not on this file system, and so nobody sweeps there
            pass
    return True


def _link(file: IO[bytes], path: str) -> bool:
    """Give a file without a name this one; False if it is taken."""
    # With a folder's descriptor, which is not needed for the path: only then does Python ask to follow the link.
    folder = os.open(os.path.dirname(path), os.O_PATH)
    try:
        os.link(f"/proc/self/fd/{file.fileno()}", path, src_dir_fd=folder, follow_symlinks=True)
    except FileExistsError:
        return False
    finally:
        os.close(folder)
    return True


def _sweep(folder: str) -> None:
    """Remove the temporary files in ``folder`` that no living process holds the lock of."""
    key = os.getpid(), folder
    if fcntl is None or key in _swept:
        return
    with suppress(OSError):
        for name in os.listdir(folder):
            if name.startswith(_PREFIX) and name.endswith(_SUFFIX):
                _remove_dead(os.path.join(folder, name))
    if len(_swept) >= _MOST_SWEPT:
        _swept.clear()
    _swept.add(key)


def _remove_dead(path: str) -> None:
    lock: Any = fcntl
    with suppress(OSError), open(path, "rb+", opener=_open_found) as file:
        lock.flock(file.fileno(), lock.LOCK_EX | lock.LOCK_NB)  # raises if a living process has it, or without locks
        # Its writer may have given it its name before the lock was free; then this one is nobody's.
        if os.path.samestat(os.fstat(file.fileno()), os.lstat(path)):
            os.unlink(path)


def _open_found(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)
