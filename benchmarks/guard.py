"""Compare the instructions that the core operations execute with the committed counts.

    python benchmarks/guard.py [--update]

Counts hardly change from run to run, so a busy machine does not disturb them; times do. They depend on the processor's
architecture, the C library, Valgrind and the versions of Python, torch and NumPy. The committed file names those. In
another setting nothing can be compared: the guard says so and passes. It fails if an operation executes more
instructions than the margin allows. Needs Linux and Valgrind.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from common import aligned
from count_instructions import BLOCKS, CALLS, EMPTY, OPERATIONS

HERE = Path(__file__).parent
COMMITTED = HERE / "results" / "instructions.json"
MARGIN = 0.03  # of a count
SLACK = 30  # instructions a call: what a read of 100 instructions may differ by
TIME_LIMIT = 900  # seconds for all operations; it takes one minute on a free machine
Counts = dict[str, int]


def setting() -> dict[str, str]:
    """Everything that the counts depend on besides the code."""
    valgrind = subprocess.run(["valgrind", "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout
    return {
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "valgrind": valgrind.strip().removeprefix("valgrind-"),
        "python": f"{platform.python_version()}, {platform.python_compiler()}",
        "torch": version("torch"),
        "numpy": version("numpy"),
    }


def count() -> Counts:
    """The instructions of one call of each operation, counted by Callgrind in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out, sockets = Path(folder, "counts"), Path(folder, "vgdb")
        command = ["setarch", "--addr-no-randomize", "valgrind", "--quiet", "--tool=callgrind", "--instr-atstart=no"]
        command += ["--collect-atstart=no", f"--callgrind-out-file={out}", f"--vgdb-prefix={sockets}"]
        command += [sys.executable, str(HERE / "count_instructions.py"), str(sockets)]
        # Nothing else of the environment, as its size moves the stack.
        env = {"PATH": os.environ["PATH"], "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIME_LIMIT
        )
        if done.returncode:
            sys.exit(f"{done.stdout}\nThe operations could not be counted: exit status {done.returncode}.")
        files = [Path(f"{out}.{i + 1}").read_text() for i in range(len(OPERATIONS) * BLOCKS)]
    totals = [int(re.findall(r"^(?:totals|summary): (\d+)", text, re.MULTILINE)[-1]) for text in files]
    least = {name: min(totals[i * BLOCKS : (i + 1) * BLOCKS]) for i, name in enumerate(OPERATIONS)}
    empty = least.pop(EMPTY)
    return {name: round((total - empty) / CALLS) for name, total in least.items()}


def too_many(got: int, expected: int) -> bool:
    return got > expected * (1 + MARGIN) + SLACK


def compare(expected: Counts, got: Counts) -> None:
    """Print all counts, and exit with an error if one is too large or is not committed."""
    rows = [["operation", "expected", "got", "change"]]
    for name in got.keys() & expected.keys():
        change = f"{got[name] / expected[name] - 1:+.1%}"
        rows.append([name, f"{expected[name]:,}", f"{got[name]:,}", change])
    print("Instructions of one call:\n\n" + aligned([rows[0], *sorted(rows[1:])]) + "\n")
    problems = [
        f"{name}: expected {expected[name]:,} instructions, got {got[name]:,} ({got[name] / expected[name] - 1:+.1%})"
        for name in OPERATIONS
        if name in got.keys() & expected.keys() and too_many(got[name], expected[name])
    ]
    if problems:
        problems.append(f"The limit is {MARGIN:.0%} and {SLACK} instructions above the committed count.")
        problems.append(
            "Make the operation cheaper. If the cost is meant, run `make guard-update` and commit the file."
        )
    if got.keys() != expected.keys():
        names = ", ".join(sorted(got.keys() ^ expected.keys()))
        problems.append(f"Counted or committed, but not both: {names}. Run `make guard-update` and commit the file.")
    if problems:
        sys.exit("\n".join(problems))
    print(f"All are within {MARGIN:.0%} and {SLACK} instructions of the committed counts.")


def main() -> None:
    options = argparse.ArgumentParser(
        description="Compare the instructions of the core operations with committed ones."
    )
    options.add_argument("--update", action="store_true", help="write the committed file anew")
    update = options.parse_args().update
    missing = [tool for tool in ("valgrind", "vgdb", "setarch") if shutil.which(tool) is None]
    if missing:
        problem = f"{', '.join(missing)} not found: install Valgrind, for example with `apt-get install valgrind`."
        sys.exit(problem) if update else print(f"Not compared. {problem}")
        return
    here = setting()
    if update:
        COMMITTED.write_text(json.dumps({"setting": here, "instructions": count()}, indent=1) + "\n")
        print(f"wrote {COMMITTED}")
        return
    committed = json.loads(COMMITTED.read_text())
    other = [f"{what} is {here[what]}, not {name}" for what, name in committed["setting"].items() if here[what] != name]
    if other:
        print(f"Not compared. The counts were committed in another setting: {'; '.join(other)}.")
        return
    compare(committed["instructions"], count())


if __name__ == "__main__":
    main()
