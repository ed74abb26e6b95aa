"""Compare every operation of DeviceDict with other containers of a batch: one table of ratios, on this machine.

    python benchmarks/bench_peers.py [--fields 40] [--times] [--quick] [--rounds N] [--json PATH]

The batch has 32 rows; a field is float32[32, 16]. Before the timing, an assertion checks that all contenders give equal
results. The cell of an operation that a contender does not have is empty. In every round, the contenders are timed one
right after the other. The ratio of their times cancels other load on the machine. All contenders use one thread.
Packages that are not installed are left out and named. Only safetensors is required, for the files.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from math import isnan, nan
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor
from torch.utils.benchmark import Compare, Measurement, TaskSpec, Timer
from torch.utils.data import default_collate

sys.path.insert(0, str(Path(__file__).parent))  # a spawned process does not have the folder of the script in sys.path
import bench_loader
import peers
from common import Seconds, aligned, cause, fresh, in_turn, interleaved, parser, ratio, same, setting, write
from memory import peak_growth
from peers import OURS, ROWS, Contender, Row, make, names, plain, scope

WIDTH = 16
AROUND = "around it"  # the key of the table of times that are not operations of the container
LARGE = 32768  # the width of a field of 4 MiB, for peak memory
FRESH = 3  # the most rounds of imports, which take seconds
MESSAGES = 20  # batches through the queue in one round


IMPORTING = """
import torch
from time import perf_counter
from memory import peak_growth
start = perf_counter()
grown = peak_growth({!r}, {{}})
print(perf_counter() - start, "nan" if grown is None else grown)
"""


class Bench:
    """Run the parts. Keep the measurements, and the contenders that were left out."""

    def __init__(self, count: int, rounds: int, folder: str) -> None:
        self.rounds, self.folder = rounds, folder
        self.size = bench_loader.Size(count, (WIDTH,))
        self.batch: dict[str, Tensor] = default_collate(self.size.samples(ROWS))
        self.left_out: dict[str, str] = {}
        self.times: list[Measurement] = []
        self.lines: list[dict[str, Any]] = []
        self.scopes: dict[Contender, dict[str, Any]] = {}
        for one in peers.CONTENDERS:
            try:
                self.scopes[one] = scope(one, self.batch, folder)
            except ImportError as error:
                self.left_out[one.name] = str(error)

    def present(self, row: Row) -> dict[Contender, str]:
        return {one: code for one, code in row.codes.items() if one in self.scopes}

    def leave_out(self, row: Row, one: Contender, error: Exception) -> None:
        """Leave out a peer that fails, and report the reason. An error of our own contender is raised."""
        if one is OURS:
            raise error
        self.left_out[f"{one.name} in {row.name!r}"] = cause(error)

    def statements(self, rows: Sequence[Row], label: str) -> None:
        """The operations that a timer can repeat."""
        cases: dict[str, dict[str, Timer]] = {}
        for row in rows:
            cases[row.name], expected = {}, None
            for one, code in self.present(row).items():
                known = self.scopes[one]
                try:
                    if row.result:
                        exec(code, known)
                    result = plain(eval(row.result or code, known))
                    expected = result if expected is None else expected
                    assert same(expected, result), "gives another result"
                except Exception as error:
                    self.leave_out(row, one, error)
                else:
                    cases[row.name][one.name] = Timer(code, globals=known)
        for name, seconds in interleaved(cases, self.rounds).items():
            self.keep(name, seconds, label)

    def container(self) -> None:
        self.statements((*peers.CONTAINER, *peers.STRINGS), "the container")

    def files(self) -> None:
        self.statements(peers.FILES, AROUND)

    def loader(self) -> None:
        """The seconds per batch that a worker collates from samples in memory."""
        loaders: dict[str, Any] = {}
        for one, code in self.present(peers.COLLATED).items():
            known = self.scopes[one]
            sample = partial(make, one, known, batch_size=())
            contender = bench_loader.Contender(one.name, sample, eval(code, known))
            batches = bench_loader.batches_of(contender, self.size, workers=1)
            try:
                assert same(plain(self.batch), plain(next(batches))), "gives another batch"
            except Exception as error:
                self.leave_out(peers.COLLATED, one, error)
            else:
                loaders[one.name] = batches
        self.keep(peers.COLLATED.name, bench_loader.seconds_of(loaders, self.rounds, workers=1))

    def queue(self) -> None:
        """The seconds until another process has received a new batch and confirmed it."""
        context = torch.multiprocessing.get_context("spawn")
        there, back = context.SimpleQueue(), context.SimpleQueue()
        receiver = context.Process(target=receive, args=(there, back), daemon=True)
        receiver.start()

        def send(one: Contender, code: str, checked: bool = False) -> float:
            known = {
                **self.scopes[one],
                "x": make(one, self.scopes[one], {k: v.clone() for k, v in self.batch.items()}),
            }
            start = perf_counter()
            there.put((checked, eval(code, known)))
            answer = back.get()
            seconds = perf_counter() - start
            assert not checked or same(plain(self.batch), plain(answer)), "gives another batch"
            return seconds

        senders: dict[str, Callable[[], float]] = {}
        for one, code in self.present(peers.QUEUED).items():
            try:
                send(one, code, checked=True)
            except Exception as error:
                self.leave_out(peers.QUEUED, one, error)
            else:
                senders[one.name] = partial(send, one, code)
        seconds: Seconds = {who: [] for who in senders}
        for i in range(self.rounds):
            for who in in_turn(senders, i):
                seconds[who].append(median(senders[who]() for _ in range(MESSAGES)))
        there.put(None)
        receiver.join()
        self.keep(peers.QUEUED.name, seconds)

    def imports(self) -> None:
        """The time and the memory of importing each package after torch, in a new interpreter."""
        codes = {one.name: code for one, code in self.present(peers.IMPORT).items()}
        measured: dict[str, list[list[float]]] = {who: [] for who in codes}
        for i in range(-1, min(self.rounds, FRESH)):  # the first call fills file caches
            for who in in_turn(measured, i):
                numbers = fresh("-c", IMPORTING.format(codes[who]))
                measured[who] += [numbers] if i >= 0 else []
        self.keep(peers.IMPORT.name, {who: [seconds for seconds, _ in each] for who, each in measured.items()})
        memory = {who: [grown for _, grown in each] for who, each in measured.items()}
        if not any(map(isnan, chain(*memory.values()))):
            self.keep(f"{peers.IMPORT.name}, peak memory", memory, unit="bytes")

    def memory(self) -> None:
        """The peak growth of the resident memory while a statement runs, in a new interpreter."""
        for row in peers.MEASURED:
            grown: dict[str, list[float]] = {}
            for one in self.present(row):
                try:  # once, because it hardly varies
                    grown[one.name] = fresh(__file__, "--fields", str(len(self.batch)), "--peak", row.name, one.name)
                except subprocess.CalledProcessError as error:
                    self.leave_out(row, one, error)
            if any(map(isnan, chain(*grown.values()))):
                self.left_out["peak memory"] = "this system does not report it"
                return
            self.keep(f"{row.name}, peak memory", grown, unit="bytes")

    def keep(
        self, name: str, measured: Mapping[str, Sequence[float]], label: str = AROUND, unit: str = "seconds"
    ) -> None:
        ratios = {who: ratio(values, measured[OURS.name]) for who, values in measured.items()}
        medians = {who: median(values) for who, values in measured.items()}
        self.lines.append({"operation": name, "unit": unit, "medians": medians, "ratios": ratios})
        if unit == "seconds":
            for who, values in measured.items():
                spec = TaskSpec("", "", label=label, sub_label=name, description=who)
                self.times.append(Measurement(1, list(values), spec))


def receive(there: Any, back: Any) -> None:
    """Run in the other process: hold each batch until the next one arrives, and send it back if asked."""
    while (message := there.get()) is not None:
        checked, batch = message
        back.put(batch if checked else None)


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """A line for each operation: the times of the others as multiples of our time."""
    columns = [
        one.name for one in peers.CONTENDERS if one is not OURS and any(one.name in line["ratios"] for line in lines)
    ]
    rows = [["", *columns]]
    for line in lines:
        shown = (line["ratios"].get(who) for who in columns)
        cells = [r and f"{short(r['median'])} ({short(r['min'])}..{short(r['max'])})" for r in shown]
        rows.append([line["operation"], *(cell or "" for cell in cells)])
    return aligned(rows)


def short(value: float) -> str:
    """Format a number with two digits, or with all digits before the point."""
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def main() -> None:
    options = parser("Every operation beside what else holds a batch, as ratios.")
    options.add_argument("--fields", type=int, default=40, help="how many the batch has (40)")
    options.add_argument("--times", action="store_true", help="print the times too, as torch.utils.benchmark.Compare")
    options.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)  # an operation and a contender, for `memory`
    args = options.parse_args()
    if args.fields < 2:
        options.error("a batch has at least two fields here, as one is packed already")
    torch.set_num_threads(1)
    if args.peak:
        print(peak(*args.peak, args.fields))
        return
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args.fields, args.rounds, folder)
        versions = {one.package: torch if one in bench.scopes else None for one in peers.CONTENDERS if one.package}
        measured = setting(**versions)
        print(", ".join(f"{what} {name or 'is not installed, it is left out'}" for what, name in measured.items()))
        for part in (bench.container, bench.files, bench.loader, bench.queue, bench.imports, bench.memory):
            print(f"measuring: {part.__name__}", file=sys.stderr)
            part()
    if args.times:
        times = Compare(bench.times)
        times.highlight_warnings()
        print(times)
    print(f"\nA batch of {args.fields} fields of float32[{ROWS}, {WIDTH}]. What the others take, as a multiple of what")
    print(f"{OURS.name} takes: the median (least..greatest) of {args.rounds} rounds; above 1 {OURS.name} is faster,")
    print("or takes less memory. Empty: they do not have it. What each runs stands in benchmarks/peers.py.\n")
    print(table(bench.lines))
    for what, reason in bench.left_out.items():
        print(f"left out: {what}: {reason}")
    results = {"fields": args.fields, "rounds": args.rounds, "left_out": bench.left_out, "results": bench.lines}
    write(args.json, {**measured, **results})


def peak(operation: str, who: str, count: int) -> float:
    """The peak memory of a statement in bytes, without the container of large fields itself."""
    code = next(row for row in peers.MEASURED if row.name == operation).codes
    one = next(one for one in code if one.name == who)
    known = names(one)
    known["x"] = make(one, known, {f"k{i}": torch.ones(ROWS, LARGE) for i in range(count)})
    grown = peak_growth(f"result = {code[one]}", known)
    return nan if grown is None else grown


if __name__ == "__main__":
    main()
