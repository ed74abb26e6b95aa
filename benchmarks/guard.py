"""Compare the instructions of the core operations with the committed counts, and with those of a plain loop.

    python benchmarks/guard.py [--update | --quotients] [--only TEXT]

The guard fails if an operation executes more instructions than the limit, or more than its ceiling: a multiple of the
instructions of a loop that does the same with plain dicts. The ceilings are in `count_instructions.py`. A busy machine
changes times, but hardly changes counts. Counts depend on the processor's architecture, the C library, Valgrind,
Python, torch and NumPy. The committed file names them. In another setting the guard compares nothing, says so and
passes. With --quotients, it compares with the ceilings alone, in any setting. It needs Linux and Valgrind.
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

from count_instructions import BLOCKS, CALLS, EMPTY, OPERATIONS, by_hand, statements
from harness import aligned, commit

HERE = Path(__file__).parent
COMMITTED = HERE / "results" / "instructions.json"
# An operation may execute this share more than committed, and this many instructions. A read executes so few that a
# share of them is less than one bytecode instruction.
MARGIN = 0.05
SLACK = 20
TIME_LIMIT = 900  # seconds for all operations; a free machine takes one to two minutes
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


def count(only: str = "") -> Counts:
    """Count the instructions of one call of each statement, in a process of its own. ``only``: a part of the names."""
    names = list(statements(only))
    with tempfile.TemporaryDirectory() as folder:
        out, sockets = Path(folder, "counts"), Path(folder, "vgdb")
        command = ["setarch", "--addr-no-randomize", "valgrind", "--quiet", "--tool=callgrind", "--instr-atstart=no"]
        command += ["--collect-atstart=no", f"--callgrind-out-file={out}", f"--vgdb-prefix={sockets}"]
        command += [sys.executable, "-m", f"{HERE.name}.count_instructions", str(sockets), only]
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
        files = [Path(f"{out}.{i + 1}").read_text() for i in range(len(names) * BLOCKS)]
    totals = [int(re.findall(r"^(?:totals|summary): (\d+)", text, re.MULTILINE)[-1]) for text in files]
    least = {name: min(totals[i * BLOCKS : (i + 1) * BLOCKS]) for i, name in enumerate(names)}
    empty = least.pop(EMPTY)
    return {name: round((total - empty) / CALLS) for name, total in least.items()}


def compare(got: Counts, committed: Counts | None) -> None:
    """Print all counts. Exit with an error for a count above its limit, and for one that is not in both.

    ``committed``: None to compare the operations with their ceilings alone.
    """
    rows = [["operation", "committed", "got", "change", "by hand", "quotient", "ceiling"]]
    problems: list[str] = []
    for name, operation in OPERATIONS.items():
        if name not in got:
            continue
        now, before, hand = got[name], (committed or {}).get(name), got.get(by_hand(name))
        row = [name, "", f"{now:,}", "", "", "", ""]
        if before is not None:
            row[1], row[3] = f"{before:,}", f"{now / before - 1:+.1%}"
            if now > before * (1 + MARGIN) + SLACK:
                problems.append(
                    f"{name}: expected {before:,} instructions, got {now:,} ({row[3]}). The limit is {MARGIN:.0%} and "
                    f"{SLACK} above the committed count; if you mean the cost, run `make guard-update`."
                )
        if hand is not None:
            row[4:] = f"{hand:,}", f"{now / hand:.2f}", f"{operation.ceiling:.2f}"
            if now > operation.ceiling * hand:
                problems.append(
                    f"{name}: expected at most {operation.ceiling:.2f} times the {hand:,} instructions of "
                    f"`{operation.by_hand}`, got {now / hand:.2f} times. Make `{operation.statement}` cheaper."
                )
        rows.append(row)
    print("Instructions of one call:\n\n" + aligned(rows) + "\n", flush=True)
    if committed is not None and committed.keys() != got.keys():
        names = ", ".join(sorted(committed.keys() ^ got.keys()))
        problems.append(f"These counts are new or gone: {names}. Run `make guard-update` and commit the file.")
    if problems:
        sys.exit("\n".join(problems))
    print("No count is above its limit.")


def main() -> None:
    options = argparse.ArgumentParser(
        description="Compare the instructions of the core operations with committed ones."
    )
    options.add_argument("--update", action="store_true", help="write the committed file anew")
    options.add_argument("--quotients", action="store_true", help="compare with the plain loops alone, in any setting")
    options.add_argument(
        "--only", default="", metavar="TEXT", help="with --quotients: operations with this in the name"
    )
    given = options.parse_args()
    missing = [tool for tool in ("valgrind", "vgdb", "setarch") if shutil.which(tool) is None]
    if missing:
        problem = f"Not found: {', '.join(missing)}. Install Valgrind, for example with `apt-get install valgrind`."
        if given.update:
            sys.exit(problem)
        print(f"Nothing is compared. {problem}")
        return
    if given.quotients:
        compare(count(given.only), None)
        return
    here = setting()
    if given.update:
        counted = {"commit": commit(), "setting": here, "instructions": count()}
        COMMITTED.write_text(json.dumps(counted, indent=1) + "\n")
        print(f"The counts are in {COMMITTED}. Commit the file.")
        return
    committed = json.loads(COMMITTED.read_text())
    other = [f"{what} is {here[what]}, not {name}" for what, name in committed["setting"].items() if here[what] != name]
    if other:
        print(f"Nothing is compared, as the counts were committed in another setting: {'; '.join(other)}.")
        return
    compare(count(), committed["instructions"])


if __name__ == "__main__":
    main()
