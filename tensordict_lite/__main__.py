"""The command line: what is in files of tensors and in tables. ``python -m tensordict_lite PATH...``."""

from __future__ import annotations

import argparse
import errno
import importlib.util
import json
import os
import signal
import sys
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ._batch.joined_rows import JoinedRows
from ._dict.device_dict import DeviceDict
from ._dict.io import load
from ._encoders.builtin import Utf8
from ._errors import InvalidFileError
from ._look.describe import entries
from ._look.page import as_text, one_line
from ._look.values import rows_page
from ._memory.device import CPU
from ._tree.fields import fields
from ._tree.missing import closest
from ._tree.policy import Policy
from .tables.format import INDEX, PART
from .tables.parts import load_parts
from .tables.verify import verify

_ABOUT = """Show what is in a safetensors file, a table, a folder with the parts of a table, or a file of torch.save.
Reads headers and single numbers only, unless an option asks for more."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 0, 1 for a damaged file, or 2 for another error."""
    parser = argparse.ArgumentParser("python -m tensordict_lite", description=_ABOUT)
    parser.add_argument("path", nargs="+", help="a file or a folder")
    parser.add_argument("--rows", type=int, metavar="N", help="show the values of the first N rows")
    parser.add_argument("--describe", action="store_true", help="show statistics of each field")
    parser.add_argument("--verify", action="store_true", help="read everything, and name the first damage (status 1)")
    parser.add_argument("--json", action="store_true", help="print JSON, one line for each path")
    parser.add_argument("--key", action="append", metavar="A.B", help="show this field or nested dict only")
    given = parser.parse_args(arguments)
    if given.rows is not None and given.rows < 0:
        parser.error(f"--rows takes a number of rows, got {given.rows}")
    bar = not given.json and sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None
    status = 0
    for path in given.path:
        try:
            print(_verified(path, given.json, bar) if given.verify else _look_at(path, given, bar))
        except (InvalidFileError, OSError, LookupError, ValueError, TypeError, ImportError) as error:
            said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            reason = (error.args[0] if isinstance(error, KeyError) else said).replace(f"{path}: ", "").splitlines()[0]
            print(f"{one_line(path)}: {one_line(reason)}", file=sys.stderr)
            status = max(status, 1 if isinstance(error, InvalidFileError) else 2)
    return status


def _verified(path: str, as_json: bool, bar: bool) -> str:
    """Raises ``InvalidFileError`` for damage."""
    opened = _opened(path)  # which finds a missing part too
    if os.path.isdir(path):
        names = sorted(filter(PART.fullmatch, os.listdir(path))) if isinstance(opened, JoinedRows) else [""]
        for name in names:
            verify(os.path.join(path, name), progress=bar)
        said = "no damage found"
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise InvalidFileError(f"{path}: {damaged!r} in it is damaged")
        said = "no damage found"
    else:
        said = "it can be opened; files of this format have no checksums"
    return json.dumps({"path": path, "verified": said}) if as_json else f"{one_line(path)}: {said}"


def _look_at(path: str, given: argparse.Namespace, bar: bool) -> str:
    opened = _opened(path)
    parts = [_chosen(d, given.key) for d in (opened.parts if isinstance(opened, JoinedRows) else [opened])]
    whole: Any = JoinedRows(parts) if isinstance(opened, JoinedRows) else parts[0]
    described: Any = whole.describe(progress=bar) if given.describe else None
    rows = whole if isinstance(whole, JoinedRows) else whole.rows
    first: Any = None if given.rows is None else rows[: given.rows]
    if given.json:
        found = {"path": path, "fields": described.tolist() if described else entries(parts)}
        return json.dumps(found if first is None else {**found, "rows": first.rows.tolist()}, default=str)
    texts = [f"{one_line(path)}:"] if len(given.path) > 1 else []
    if isinstance(whole, JoinedRows) and not described:  # the title of the statistics
        texts.append(repr(whole))
    if first is not None:
        texts.append(as_text(rows_page(first, len(rows), shown=len(first.rows))))
    if described:
        texts.append(repr(described))
    return "\n".join(texts if described or first is not None else [*texts, repr(parts[0])])


def _opened(path: str) -> Any:
    """A `DeviceDict`, or the `JoinedRows` of parts."""
    if _is_archive(path):
        try:
            return _as_tree(torch.load(path, "cpu", weights_only=True, mmap=zipfile.is_zipfile(path)))
        except Exception as error:  # a damaged pickle may raise any error, a cut file EINVAL
            if isinstance(error, OSError) and error.errno != errno.EINVAL:
                raise
            reason = str(error).partition("\n")[0].partition(". ")[0]
            raise InvalidFileError(f"not a file that torch.load(weights_only=True) reads: {reason}") from error
    is_parts = os.path.isdir(path) and not os.path.exists(os.path.join(path, INDEX))
    read: Any = load_parts if is_parts and any(map(PART.fullmatch, os.listdir(path))) else load
    try:
        return read(path)
    except InvalidFileError:
        return read(path, encoders=Utf8())  # without encoders that `load` does not build, such as `Tokenizer`


def _is_archive(path: str) -> bool:
    """Whether torch.save wrote the file. The header of a safetensors file is no longer than 100 MB."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        start = file.read(8)
    return start[4:] != bytes(4) and start.startswith((b"PK\x03\x04", b"\x80\x02"))


def _as_tree(value: Any) -> Any:
    """A dict of what torch.load returned: mappings and lists with tensors become nested dicts."""
    if isinstance(value, DeviceDict):
        return value
    items = value if isinstance(value, Mapping) else dict(enumerate(value)) if _has_tensors(value) else {"": value}
    tree = {
        str(key): _as_tree(one) if isinstance(one, Mapping) or _has_tensors(one) else one for key, one in items.items()
    }
    return DeviceDict._new(tree, CPU, Policy().override(objects="keep"))


def _has_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(one, (Tensor, Mapping, list, tuple)) for one in value)


def _chosen(d: DeviceDict[Any], keys: Sequence[str] | None) -> DeviceDict[Any]:
    """The fields at the dotted paths, or below them."""
    if keys is None:
        return d
    found = {".".join(field.path): field.path for field in fields(d)}
    for key in keys:
        if not any(name == key or name.startswith(f"{key}.") for name in found):
            close = closest(key, list(found))
            raise ValueError(f"no field {key!r}" + (f"; did you mean {close!r}?" if close else ""))
    return d.select(*[path for name, path in found.items() if f"{name}.".startswith(tuple(f"{key}." for key in keys))])


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the program without an error
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: the stream is closed
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.exit(main())
