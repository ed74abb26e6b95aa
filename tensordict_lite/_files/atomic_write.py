"""Write a file atomically: the new file replaces the old file completely or not at all."""

from __future__ import annotations

import os
import platform
import secrets
import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from hashlib import blake2b
from threading import Thread
from typing import IO, Any, cast

try:
    import fcntl
except ImportError:  # pragma: no cover  (Windows)
    fcntl = None

FilePath = str | bytes | os.PathLike[str] | os.PathLike[bytes]

_BUFFER = 1 << 20
_PREFIX = f".tensordict_lite-{blake2b(platform.node().encode(), digest_size=4).hexdigest()}-"
"""The prefix of temporary files. It names the host, because some network file systems lock files on one host only."""
_SUFFIX = ".tmp"
_swept: set[tuple[int, str]] = set()
"""Process ids and folders that were swept. Each process sweeps a folder once, since a folder may have many files."""
_MOST_SWEPT = 1000
"""The size at which `_swept` is cleared."""
_THREADS = 16
"""The largest number of threads that `sync_files` starts. Times for 12 files of 1.3 MiB on ext4:

======= =========
threads time (ms)
======= =========
1       48
2       28
12      20
======= =========
"""

_sync: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)  # fdatasync skips the time of the last change


def atomic_write(
    path: FilePath, pieces: Iterable[bytes | memoryview], *, sync: bool = True, others: Sequence[str] = ()
) -> None:
    """Write ``pieces`` to a new file, flush the file to disk, and then rename it to ``path``.

    If an error occurs, the old file at ``path`` is unchanged and no temporary file remains. A killed process can leave
    a temporary file: while it replaces an old file, or if the file system has no unnamed files. No process holds the
    lock of such a file. The first `atomic_write` of a process in the folder removes the file.

    ``sync``: if False, the system may flush the file to disk later, and a crash of the machine may lose the file.
    ``others``: the paths of other files. They are flushed to disk before the rename.

    Raises ``OSError`` if ``path`` exists and is not a regular file, or if the file cannot be written.
    """
    target = os.path.realpath(os.fsdecode(path))
    if os.path.exists(target) and not os.path.isfile(target):
        raise OSError(f"{os.fsdecode(path)!r} exists and is not a regular file, so it cannot be replaced")
    folder = os.path.dirname(target)
    os.stat(os.path.join(folder, ""))  # raises if it is no folder; a later error would name the temporary file
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
        if sync:
            sync_files(others, file)
        if named or not _link(file, target):
            if not named:
                _lock_file(file)
                _link(file, beside)
            if fcntl is None:
                file.close()  # Windows cannot rename an open file; other systems hold the lock until the rename
            os.replace(beside, target)
        file.close()
    except BaseException:
        # An interrupt may occur between any two steps, so remove the temporary file whether or not it exists.
        with suppress(OSError):
            os.unlink(beside)
        if file is not None:
            cast(Any, file).raw.close()  # no flush, because an error of the flush would hide this error
        raise
    if not sync:
        return
    with suppress(OSError):  # flush the new name to disk too, on systems that can open a folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_files(paths: Sequence[str], file: IO[bytes] | None = None) -> None:
    """Flush the files at ``paths`` and an open ``file`` to disk. Threads flush several files at the same time.

    Raises ``OSError``.
    """
    left = list(paths)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while left:
                with open(left.pop(), "r+b", buffering=0) as other:
                    _sync(other.fileno())
        except IndexError:  # another thread took the last path
            pass
        except BaseException as error:  # raised below, in the thread of the caller
            errors.append(error)

    threads: list[Thread] = []
    try:
        # A process that exits or has too many threads cannot start a thread. Then this thread flushes the files.
        with suppress(RuntimeError):
            for _ in range(min(_THREADS, len(left) - (file is None))):
                thread = Thread(target=work)
                thread.start()
                threads.append(thread)
        if file is not None:
            os.fsync(file.fileno())
        work()
    finally:
        left.clear()  # so that the threads end early after an error or an interrupt
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def _temporary(folder: str) -> str:
    return os.path.join(folder, f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}")


def _nameless(folder: str) -> IO[bytes] | None:
    """A new unnamed file in ``folder``; None if the system has no unnamed files.

    The system deletes an unnamed file if the process is killed.
    """
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
    """A new locked file at ``path``; None if another process locked the file first, in its sweep, and removes it."""
    file = open(path, "xb", buffering=_BUFFER)  # noqa: SIM115
    if _lock_file(file) and os.fstat(file.fileno()).st_nlink:
        return file
    file.close()
    return None


def _lock_file(file: IO[bytes]) -> bool:
    """Lock an open file until it is closed. False if another process has locked it; True on systems without locks."""
    if fcntl is not None:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # the file system has no locks, so no process sweeps there
            pass
    return True


def _link(file: IO[bytes], path: str) -> bool:
    """Give an unnamed file the name ``path``; False if ``path`` exists."""
    # Python follows the link only if `src_dir_fd` is given. The absolute path does not need the descriptor.
    folder = os.open(os.path.dirname(path), os.O_PATH)
    try:
        os.link(f"/proc/self/fd/{file.fileno()}", path, src_dir_fd=folder, follow_symlinks=True)
    except FileExistsError:
        return False
    finally:
        os.close(folder)
    return True


def _sweep(folder: str) -> None:
    """Call `sweep`, unless this process swept the folder before."""
    key = os.getpid(), folder
    if fcntl is None or key in _swept:
        return
    sweep(folder)
    if len(_swept) >= _MOST_SWEPT:
        _swept.clear()
    _swept.add(key)


def sweep(folder: str) -> None:
    """Remove the temporary files in ``folder`` that no living process has locked."""
    with suppress(OSError):
        for name in os.listdir(folder) if fcntl is not None else ():
            if name.startswith(_PREFIX) and name.endswith(_SUFFIX):
                _remove_dead(os.path.join(folder, name))


def is_temporary(name: str) -> bool:
    """Whether a file with this name is a temporary file of `atomic_write`, on any host."""
    return name.startswith(".tensordict_lite-") and name.endswith(_SUFFIX)


def _remove_dead(path: str) -> None:
    """Remove a temporary file if no process has locked it."""
    lock: Any = fcntl
    with suppress(OSError), open(path, "rb+", opener=_open_found) as file:
        lock.flock(file.fileno(), lock.LOCK_EX | lock.LOCK_NB)  # raises if a process has the lock, or without locks
        # The writer may have renamed the file just before it released the lock. Then `path` is another file or none.
        if os.path.samestat(os.fstat(file.fileno()), os.lstat(path)):  # pragma: no branch  (a race)
            os.unlink(path)


def _open_found(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)
