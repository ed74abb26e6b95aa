"""Compare the instructions that the core operations execute with the committed counts.

    python benchmarks/guard.py [--update]

The guard fails if an operation executes more instructions than the limit. A busy machine changes times, but hardly
changes counts. Counts depend on the processor's architecture, the C library, Valgrind, Python, torch and NumPy. The
committed file names them. In another setting the guard compares nothing, says so and passes. It needs Linux and
Valgrind.
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

from count_instructions import BLOCKS, CALLS, EMPTY, OPERATIONS
from harness import aligned, commit

HERE = Path(__file__).parent
COMMITTED = HERE / "results" / "instructions.json"
# An operation may execute this share more than committed, and this many instructions. A read executes so few that a
# share of them is less than one bytecode instruction.
MARGIN = 0.05
SLACK = 20
TIME_LIMIT = 900  # seconds for all operations; a free machine takes one minute
Counts = dict[str, int]


def setting() -> dict[str, str]:
    """Return what the counts depend on besides the code."""
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
    """Count the instructions of one call of each operation, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out, sockets = Path(folder, "counts"), Path(folder, "vgdb")
        command = ["setarch", "--addr-no-randomize", "valgrind", "--quiet", "--tool=callgrind", "--instr-atstart=no"]
        command += ["--collect-atstart=no", f"--callgrind-out-file={out}", f"--vgdb-prefix={sockets}"]
        command += [sys.executable, "-m", f"{HERE.name}.count_instructions", str(sockets)]
        # A small, fixed environment: its size moves the stack, and other variables may change what torch does.
        env = {"PATH": os.environ["PATH"], "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command,
            check=False,
            cwd=HERE.parent,  # so that the package is that of this checkout
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIME_LIMIT,
        )
        if done.returncode:
            sys.exit(f"{done.stdout}\nThe operations could not be counted: exit status {done.returncode}.")
        files = [Path(f"{out}.{i + 1}").read_text() for i in range(len(OPERATIONS) * BLOCKS)]
    totals = [int(re.findall(r"^(?:totals|summary): (\d+)", text, re.MULTILINE)[-1]) for text in files]
    least = {name: min(totals[i * BLOCKS : (i + 1) * BLOCKS]) for i, name in enumerate(OPERATIONS)}
    empty = least.pop(EMPTY)
    return {name: round((total - empty) / CALLS) for name, total in least.items()}


def compare(expected: Counts, got: Counts) -> None:
    """Print all counts. Exit with an error if a count is above its limit, or is not in both."""
    rows, problems = [["operation", "expected", "got", "change"]], []
    for name in OPERATIONS:
        if name not in expected or name not in got:
            continue
        before, now = expected[name], got[name]
        rows.append([name, f"{before:,}", f"{now:,}", f"{now / before - 1:+.1%}"])
        if now > before * (1 + MARGIN) + SLACK:
            problems.append(f"{name}: expected {before:,} instructions, got {now:,} ({now / before - 1:+.1%}).")
    print("Instructions of one call:\n\n" + aligned(rows) + "\n", flush=True)
    if problems:
        problems.append(f"The limit is {MARGIN:.0%} and {SLACK} instructions above the committed count.")
        problems.append(
            "Make the operation cheaper. If you mean the cost, run `make guard-update` and commit the file."
        )
    if expected.keys() != got.keys():
        names = ", ".join(sorted(expected.keys() ^ got.keys()))
        problems.append(f"These operations are new or gone: {names}. Run `make guard-update` and commit the file.")
    if problems:
        sys.exit("\n".join(problems))
    print(f"No count is more than {MARGIN:.0%} and {SLACK} instructions above the committed one.")


def main() -> None:
    options = argparse.ArgumentParser(
        description="Compare the instructions of the core operations with committed ones."
    )
    options.add_argument("--update", action="store_true", help="write the committed file anew")
    update = options.parse_args().update
    missing = [tool for tool in ("valgrind", "vgdb", "setarch") if shutil.which(tool) is None]
    if missing:
        problem = f"Not found: {', '.join(missing)}. Install Valgrind, for example with `apt-get install valgrind`."
        if update:
            sys.exit(problem)
        print(f"Nothing is compared. {problem}")
        return
    here = setting()
    if update:
        counted = {"commit": commit(), "setting": here, "instructions": count()}
        COMMITTED.write_text(json.dumps(counted, indent=1) + "\n")
        print(f"The counts are in {COMMITTED}. Commit the file.")
        return
    committed = json.loads(COMMITTED.read_text())
    other = [f"{what} is {here[what]}, not {name}" for what, name in committed["setting"].items() if here[what] != name]
    if other:
        print(f"Nothing is compared, as the counts were committed in another setting: {'; '.join(other)}.")
        return
    compare(committed["instructions"], count())


if __name__ == "__main__":
    main()
