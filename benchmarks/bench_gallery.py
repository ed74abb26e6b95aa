"""What the programs of the gallery cost beside the same programs with plain dicts, as ratios of times.

    python benchmarks/bench_gallery.py [--quick] [--rounds N] [--json PATH]

First whole programs: ``run`` of ``examples/NAME.py`` and of ``examples/plain_NAME.py``, after imports. Both must return
the same result. The plain program runs twice in each round: the ratio of the two times is the noise. Then parts of the
programs. All contenders compute with one thread. In every round they are timed right after each other.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.benchmark import Timer

from tensordict_lite import DeviceDict

sys.path.insert(0, str(Path(__file__).parent))  # a script has it there already; runpy has not
from common import Seconds, aligned, interleaved, parser, ratio, ratio_table, same, setting, write

EXAMPLES = Path(__file__).parent.parent / "examples"
OURS, DICT, AGAIN = "ours", "dict", "dict again"
ROUND_SECONDS = 0.8  # for each round that is asked for, a program has so many seconds in all; three rounds at least
CPU = torch.device("cpu")
# The arguments of `run`: small enough for many rounds. FOLDER is an empty folder, or a file in it.
PROGRAMS: dict[str, Callable[[Path], tuple[Any, ...]]] = {
    "classifier": lambda _: (128, 1, 2, CPU),
    "ppo": lambda _: (2, CPU),
    "finetune": lambda _: (10, CPU),
    "checkpoint": lambda folder: (folder / "checkpoint.pt", "cpu"),
    "soup": lambda _: (2,),
    "rows": lambda _: (2_000_000, 100, 2),
    "table": lambda folder: (folder / "stripes", 5000, 128, 2),
    "typed": lambda _: (512, 6),
    "penguins": lambda _: (20, 0),
}
RANKS = "ddp_penguins"


def both(name: str) -> tuple[Any, Any]:
    """An example, and the same with plain dicts."""
    return importlib.import_module(name), importlib.import_module(f"plain_{name}")


def timed(program: Any, arguments: Callable[[], tuple[Any, ...]]) -> tuple[float, Any]:
    """The seconds that ``run`` of a program takes, and what it returns. What it prints is dropped."""
    given = arguments()
    gc.collect()  # what the run before has left
    with contextlib.redirect_stdout(io.StringIO()):
        start = time.perf_counter()
        result = program.run(*given)
        return time.perf_counter() - start, result


def rounds_of(name: str, arguments: Callable[[], tuple[Any, ...]], enough: Callable[[int, float], bool]) -> Seconds:
    """The seconds of both programs in each round, until ``enough(rounds, seconds)``."""
    ours, plain = both(name)
    results = [timed(program, arguments)[1] for program in (ours, plain)]  # the first run of each is not counted
    assert same(*results), f"{name}: {results}"
    contenders = {OURS: ours, DICT: plain, AGAIN: plain}
    seconds: Seconds = {who: [] for who in contenders}
    start = time.perf_counter()
    while not enough(len(seconds[OURS]), time.perf_counter() - start):
        first = len(seconds[OURS]) % len(contenders)
        for who in [*contenders][first:] + [*contenders][:first]:  # each program is as often first as the others
            seconds[who].append(timed(contenders[who], arguments)[0])
    return seconds


def on_rank(rank: int, folder: str, rounds: int) -> None:
    """The program for two processes, on one of them. Rank 0 writes the times."""
    sys.path.insert(0, str(EXAMPLES))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)

    def arguments() -> tuple[Any, ...]:
        dist.barrier()
        return 10, 0

    seconds = rounds_of(RANKS, arguments, lambda done, _: done >= rounds)
    if rank == 0:
        (Path(folder) / "seconds.json").write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def whole_programs(rounds: int) -> dict[str, Seconds]:
    found: dict[str, Seconds] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "empty"
        for name, arguments_in in PROGRAMS.items():

            def arguments(arguments_in: Callable[[Path], tuple[Any, ...]] = arguments_in) -> tuple[Any, ...]:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                return arguments_in(folder)

            found[name] = rounds_of(name, arguments, lambda done, s: done >= 3 and s > ROUND_SECONDS * rounds)
        mp.start_processes(on_rank, args=(temporary, rounds), nprocs=2, start_method="spawn")
        found[RANKS] = json.loads((Path(temporary) / "seconds.json").read_text())
    return found


def parts() -> dict[str, dict[str, Timer]]:
    """A statement of each contender for each part."""
    found: dict[str, dict[str, Timer]] = {}

    def part(operation: str, statement: str, ours: dict[str, Any], plain: dict[str, Any]) -> None:
        found[operation] = {OURS: Timer(statement, globals=ours), DICT: Timer(statement, globals=plain)}

    example, plain = both("classifier")
    samples = [example.Boxes(0, 32)[i] for i in range(32)]
    of = {"samples": samples}
    part("collate 32 images with boxes and strings", "f(samples)",
         {"f": example.collate_boxes, **of}, {"f": plain.collate_boxes, **of})  # fmt: skip

    example, plain = both("ppo")
    agent, carts = example.Agent(), example.CartPoles(16, CPU)
    part("collect a rollout", "f(agent, carts)",
         *({"f": module.collect, "agent": agent, "carts": carts} for module in (example, plain)))  # fmt: skip
    rollouts = [module.collect(agent, carts) for module in (example, plain)]
    found["shuffled minibatches of the rollout"] = {
        OURS: Timer("for b in d.rows.flatten().rows.batches(256, shuffle=True): pass", globals={"d": rollouts[0]}),
        DICT: Timer("for b in p.batches(p.flatten(d), 256): pass", globals={"p": plain, "d": rollouts[1]}),
    }

    example, plain = both("finetune")
    rows = [{"input_ids": list(range(n)), "labels": list(range(n))} for n in range(8, 40)]
    of = {"samples": rows}
    part("collate 32 sequences of tokens, given as lists", "f(samples)",
         {"f": example.collate_training, **of}, {"f": plain.collate_training, **of})  # fmt: skip

    example, plain = both("soup")
    weights = [example.new_model().state_dict() for _ in range(4)]
    part("average 4 small models", "f(weights)",
         {"f": example.soup, "weights": [DeviceDict(one) for one in weights]},
         {"f": plain.soup, "weights": [dict(one) for one in weights]})  # fmt: skip

    example, plain = both("rows")
    trips = example.trips(100_000)
    part("mean of each group of 100,000 rows", "f(table)",
         {"f": example.fares, "table": DeviceDict(trips)}, {"f": plain.fares, "table": trips})  # fmt: skip
    return found


def main() -> None:
    args = parser("Programs of the gallery beside plain dicts, as ratios.").parse_args()
    torch.set_num_threads(1)
    sys.path.insert(0, str(EXAMPLES))
    programs: list[dict[str, Any]] = []
    table = [["program", "rounds", "plain dicts (s)", "ours / it", "it / itself"]]
    for name, seconds in whole_programs(args.rounds).items():
        again = [x / y for x, y in zip(seconds[AGAIN], seconds[DICT], strict=True)]
        low, _, high = quantiles(again, n=4)
        middle = ratio(seconds[OURS], seconds[DICT])
        programs.append(
            {
                "program": name,
                "rounds": len(again),
                "median_seconds": {who: median(times) for who, times in seconds.items()},
                "ratios": {DICT: middle},
                "noise": {"median": median(again), "low": low, "high": high},  # quartiles
            }
        )
        shown = f"{middle['median']:.3f} ({middle['min']:.3f}..{middle['max']:.3f})"
        table.append(
            [
                name,
                str(len(again)),
                f"{median(seconds[DICT]):.3f}",
                shown,
                f"{median(again):.3f} ({low:.3f}..{high:.3f})",
            ]
        )
    print(aligned(table), "\n")

    lines: list[dict[str, Any]] = []
    for operation, seconds in interleaved(parts(), args.rounds).items():
        lines.append(
            {
                "operation": operation,
                "fields": "",
                "median_seconds": {who: median(times) for who, times in seconds.items()},
                "ratios": {DICT: ratio(seconds[OURS], seconds[DICT])},
                "met": None,
            }
        )
    print(ratio_table(lines, "ours / it", "", DICT))
    write(args.json, {**setting(), "rounds": args.rounds, "programs": programs, "results": lines})


if __name__ == "__main__":
    main()
