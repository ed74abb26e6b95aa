"""The folder of a table, open for a writer: its lock, its files, and the replacement of ``table.json``.

Each step is on the disk before the next step that relies on it. So a power failure at any moment leaves a whole table:

- The rows are on the disk before ``table.json`` counts them.
- The names of new files are on the disk before ``table.json`` names the files.
- ``table.json`` lists the files that the table does not use yet or any more, see `format`. Another writer removes them
  if this writer is killed.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from _thread import LockType, allocate_lock, start_new_thread
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from io import FileIO

from .._files.atomic_write import FilePath, replace_file, sync_file, sync_folder
from .._files.safetensors import invalid_file
from .format import INDEX, TableIndex, index_head, index_text, read_index, sealed

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

NEW_INDEX = ".table.json.tmp"
"""The new ``table.json``, until it replaces the old one."""
_THREADS = 16
"""The largest number of threads that flush files to disk."""


class TableFolder:
    """The folder of a table, open and locked, and the files of its columns.

    A forged folder may have links in the place of files. So a file is opened relative to the descriptor of the folder,
    and only if it is a regular file without another name.
    """

    def __init__(self, path: FilePath) -> None:
        self.path = os.path.abspath(os.fsdecode(path))
        self.files: list[FileIO] = []
        self.rows = 0
        """The number of rows in ``table.json``."""
        self.checksums: FileIO | None = None
        """The file with the checksums."""
        self._failed: tuple[int | None, str, str] | None = None
        """The arguments of the error after which every call fails."""
        self._writer = secrets.token_hex(8)
        self._heads: set[str] = set()
        """What ``table.json`` may start with, unless another writer replaced it: the text that is known to be on the
        disk, and every text of a replacement that failed since."""
        self.process = os.getpid()
        self.descriptor: int | None = None  # stays None on Windows, which opens no folders

    def lock(self) -> None:
        """Raises ``BlockingIOError`` if another writer has locked the folder, and ``OSError``."""
        if fcntl is None:
            return
        self.descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(
                f"{self.path!r} is open in a RowWriter, add_column or drop_column, in this process or another; "
                "close it, or wait for it"
            ) from error
        except OSError:  # the file system cannot lock folders
            pass

    @property
    def is_mine(self) -> bool:
        """False in a process that was forked from the process that opened the folder."""
        return self.process == os.getpid()

    @property
    def is_usable(self) -> bool:
        """False in a forked process, and after an error that is final."""
        return self.is_mine and self._failed is None

    def at(self, name: str) -> str:
        """The path of a file, relative to the descriptor if there is one."""
        return os.path.join(self.path, name) if self.descriptor is None else name

    def open(self, name: str, mode: str = "r+b") -> FileIO:
        """Open a file. Mode ``"x+b"`` replaces it by a new file. Raises ``OSError`` for a link, a pipe or a device."""
        if "x" in mode:
            self.remove(name)
        try:
            file = FileIO(self.at(name), mode, opener=self._without_following)
            found = os.fstat(file.fileno())
            if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
                return file
            file.close()
        except OSError as error:
            if error.errno == errno.EMFILE:
                message = "too many open files; a RowWriter keeps one for each column: raise the limit, see ulimit -n"
                raise OSError(error.errno, message, self.path) from error
            if error.errno != errno.ELOOP:
                raise
        raise OSError(
            f"{os.path.join(self.path, name)!r} is a link or no regular file, and a RowWriter changes only files of "
            "its own; copy the table to a new folder, with files in the place of links"
        )

    def _without_following(self, path: str, flags: int) -> int:
        flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        return os.open(path, flags, 0o666, dir_fd=self.descriptor)

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        with suppress(FileNotFoundError):
            os.unlink(self.at(name), dir_fd=self.descriptor)

    def read_index(self) -> TableIndex:
        """Read ``table.json``. Raises ``InvalidFileError``, and ``IsADirectoryError`` for a folder that is no table."""
        with invalid_file(self.path, RuntimeError):
            index = read_index(self.path, partial(self.open, mode="rb"))
        self.rows = index.rows
        return index

    def write_index(self, index: TableIndex, text: str | None = None) -> None:
        """Replace ``table.json``, and flush it to disk, with the names of all files.

        ``text``: the result of `index_text`, if it is known.
        """
        head = index_head(index, self._writer)
        whole = sealed(head + (text or index_text(index.columns, index.manifest)))
        self._heads.add(head)
        self.remove(NEW_INDEX)
        replace_file(self.at(INDEX), self.at(NEW_INDEX), [whole.encode()], self.descriptor, self._sync)
        self.sync_names()
        self._heads, self.rows = {head}, index.rows

    def remove_unused(self, names: Sequence[str]) -> None:
        """Remove the files that ``table.json`` lists as unused, durably."""
        for name in names:
            self.remove(name)
        if names:
            self.sync_names()

    def refuse_other_writer(self) -> None:
        """Raise ``BlockingIOError`` if another writer has replaced ``table.json``: some file systems have no locks."""
        with self.open(INDEX, "rb") as file:
            found = file.read(max(map(len, self._heads))).decode(errors="replace")
        if not found.startswith(tuple(self._heads)):
            message = "another RowWriter has written to this table, and the file system did not lock it out"
            self._failed = (errno.EAGAIN, f"{message}; let one process write a table at a time", self.path)
            self.refuse_failed()

    def sync_files(self, meanwhile: Callable[[], None]) -> None:
        """Flush the files to disk, several at the same time. ``meanwhile``: called while the disk works.

        Plain threads and locks: an interrupt in a `Condition`, as executors use it, can leave it locked for ever.
        """
        left = [file.fileno() for file in self.files]
        errors, running = list[BaseException](), list[LockType]()

        def work(done: LockType | None = None) -> None:
            try:
                with suppress(IndexError):
                    while True:
                        self._sync(left.pop(0))
            except BaseException as error:
                errors.append(error)
            finally:
                if done is not None:
                    done.release()

        try:
            with suppress(RuntimeError):  # a process that exits or has too many threads starts none
                for _ in range(min(_THREADS, len(left))):
                    done = allocate_lock()
                    done.acquire()
                    start_new_thread(work, (done,))
                    running.append(done)
            meanwhile()
            work()
        finally:
            left.clear()
            for done in running:
                done.acquire()
        try:
            if errors:
                raise min(errors, key=lambda error: isinstance(error, Exception))  # an interrupt, if there is one
        finally:
            errors.clear()  # they refer to this frame

    def append_checksums(self, line: bytes, at: int) -> None:
        """Write a line to the file with the checksums, from position ``at`` on, and flush it to disk."""
        assert self.checksums is not None
        self.checksums.seek(at)
        write_bytes(self.checksums, line)
        self._sync(self.checksums.fileno())

    def sync_names(self) -> None:
        """Flush the names of the files to disk."""
        if self.descriptor is not None:
            self._sync(self.descriptor, sync_folder)

    def _sync(self, descriptor: int, sync: Callable[[int], None] = sync_file) -> None:
        """Flush an open file to disk. Raises ``OSError``, and then for every other call too.

        After an error the system may have dropped the bytes, and a second call of the system would raise no error.
        """
        if self._failed is None:
            try:
                sync(descriptor)
            except OSError as error:  # kept here, since an interrupt in another thread may hide the error
                self._failed = (
                    error.errno,
                    f"{self._kept(error)}, and the system may have dropped later rows that it could not flush to disk; "
                    "close this RowWriter, and open the table again with append=True",
                    self.path,
                )
        self.refuse_failed()

    def refuse_failed(self) -> None:
        """Raise the error after which every call fails."""
        if self._failed is not None:
            raise OSError(*self._failed)

    @contextmanager
    def explained(self) -> Generator[None]:
        """Add to an ``OSError`` which rows the table keeps."""
        try:
            yield
        except OSError as error:
            if self._failed is not None:
                raise
            raise OSError(error.errno, self._kept(error), self.path) from error

    def _kept(self, error: OSError) -> str:
        return f"{error.strerror or error}; the table keeps the {self.rows} rows of the last flush"

    def close_files(self) -> None:
        """Close the files, and keep the table locked."""
        for file in (*self.files, *([] if self.checksums is None else [self.checksums])):
            file.close()
        self.files, self.checksums = [], None

    def close(self) -> None:
        """Close the files, and let another writer open the table. A later call does what an interrupt left undone."""
        self.close_files()
        if self.descriptor is not None and fcntl is not None:
            if self.is_mine:  # forked processes may hold copies of the descriptor, and share its lock
                with suppress(OSError):
                    fcntl.flock(self.descriptor, fcntl.LOCK_UN)
            descriptor, self.descriptor = self.descriptor, None
            os.close(descriptor)


def write_bytes(file: FileIO, data: bytes | memoryview) -> None:
    """Write all bytes: one call of an unbuffered file may write only some of them."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


@contextmanager
def opened(path: FilePath) -> Generator[TableFolder]:
    """Open and lock the folder of a table. It is closed after an error only."""
    folder = TableFolder(path)
    try:
        folder.lock()
        yield folder
    except BaseException:
        folder.close()
        raise
