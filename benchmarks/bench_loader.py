"""Measure a DataLoader with samples of many fields: batches per second, file descriptors, rows, and overlapped copies.

    python benchmarks/bench_loader.py [--quick] [--rounds N] [--json PATH]

The samples are in memory and nothing reads the batches, so the time is that of collating and sending. All processes
use one thread. In every round, the contenders of a case are timed one right after the other. The ratio of their times
cancels other load on the machine. If tensordict is not installed, it is left out. Without a GPU, the part that needs
one is left out.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, cycle
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.benchmark import Timer
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from tensordict_lite import DeviceDict, Utf8, collate, prefetch, stack
from tensordict_lite._memory.buffer import goes_by_value

sys.path.insert(0, str(Path(__file__).parent))  # runpy does not add the folder of the script to sys.path
from common import Seconds, aligned, cause, in_turn, interleaved, parser, ratio, same, setting, write

try:
    from tensordict import TensorDict
except ImportError:
    TensorDict = None
try:
    from torch_geometric.loader import PrefetchLoader as PyG
except ImportError:
    PyG = None
try:
    from timm.data.loader import PrefetchLoader as timm
except ImportError:
    timm = None

ROWS = 32  # rows of a batch
WARM = 5  # batches taken before a measurement: more than the workers prefetch
SECONDS = 0.3  # seconds of one measurement, about
HELD = 64  # batches to count file descriptors
STEPS = 100  # iterations of the loop on the GPU
Fields = dict[str, Tensor]


@dataclass(frozen=True)
class Size:
    """A number of fields with one dtype and shape."""

    count: int
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def samples(self, count: int) -> list[Fields]:
        """A number of samples. Every call returns the same samples."""
        generator = torch.Generator().manual_seed(0)
        keys = [sys.intern(f"k{i}") for i in range(self.count)]  # interned, as literals are

        def draw() -> Tensor:
            return torch.randint(256, self.shape, dtype=torch.uint8, generator=generator).to(self.dtype)

        return [{key: draw() for key in keys} for _ in range(count)]


@dataclass(frozen=True)
class Contender:
    """``sample`` makes a sample of the dataset from the fields. ``collate`` makes a batch of samples."""

    name: str
    sample: Callable[[Fields], Any]
    collate: Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Samples(Dataset[Any]):
    """A dataset in memory. Each process makes the samples when it first needs them."""

    size: Size
    sample: Callable[[Fields], Any]

    @cached_property
    def made(self) -> list[Any]:
        return [self.sample(fields) for fields in self.size.samples(2 * ROWS)]

    def __getitem__(self, i: int) -> Any:
        return self.made[i]


def as_peer(fields: Fields) -> Any:
    return TensorDict(fields, batch_size=[])


def consolidated(samples: list[Any]) -> Any:
    return torch.stack(samples).consolidate(share_memory=True)


def joined(fields: Fields) -> Tensor:
    """One tensor with all bytes of the sample: the minimum work of a loader."""
    return torch.cat([field.flatten() for field in fields.values()])


@dataclass(frozen=True)
class Sent:
    """A batch that another process receives as a dict of views of one tensor."""

    keys: tuple[str, ...]
    tensor: Tensor

    def __reduce__(self) -> Any:
        return views, (self.keys, self.tensor)


def views(keys: tuple[str, ...], tensor: Tensor) -> Fields:
    """The fields of samples that were stacked in turn."""
    return dict(zip(keys, tensor.unflatten(0, (-1, len(keys))).unbind(1), strict=True))


def stacked(samples: list[Fields]) -> Any:
    """The minimum work of a loader whose samples have fields of one dtype and shape. It looks at no sample."""
    keys, tensor = tuple(samples[0]), default_collate(list(chain.from_iterable(map(dict.values, samples))))
    return views(keys, tensor) if get_worker_info() is None else Sent(keys, tensor)


OURS, DICT, PEER, ONE, LEAST = "ours", "dict", "TensorDict", "one tensor", "one stack"
CONTENDERS = (
    Contender(OURS, dict, collate),
    Contender(DICT, dict, default_collate),
    Contender(PEER, as_peer, torch.stack),
    Contender("TensorDict consolidated", as_peer, consolidated),
    Contender(ONE, joined, default_collate),
    Contender(LEAST, dict, stacked),
)
Goals = Mapping[str, float]  # by contender: the smallest ratio of its time to ours
LOADED: dict[str, tuple[Size, Goals]] = {  # these goals are for loaders with workers
    "8 x 16 float32": (Size(8, (16,)), {DICT: 2.5, ONE: 1}),
    "8 x 64 float32": (Size(8, (64,)), {DICT: 2.5, ONE: 1}),
    "8 x 256 float32": (Size(8, (256,)), {DICT: 2, ONE: 1}),
    # With many fields, to stack the samples takes longer than to send one tensor.
    "40 x 16 float32": (Size(40, (16,)), {DICT: 10, ONE: 1}),
    "200 x 4 float32": (Size(200, (4,)), {DICT: 20, ONE: 1}),
    "8 x 4096 float32": (Size(8, (4096,)), {DICT: 1, ONE: 0.8}),
    "4 images": (Size(4, (3, 224, 224), torch.uint8), {DICT: 1, ONE: 0.8}),
}
WORKERS: dict[int, Goals | None] = {0: {DICT: 1}, 1: None, 2: None}  # None: the goals of the size


@dataclass(frozen=True)
class Operation:
    """An operation that uses or makes a batch: one expression for each contender."""

    name: str
    ours: str
    plain: str
    peer: str
    timed: str = "{}"
    result: str = "{}"

    def codes(self) -> dict[str, str]:
        return {OURS: self.ours, DICT: self.plain} | ({} if TensorDict is None else {PEER: self.peer})


AS_LOOP: Goals = {DICT: 1 / 1.1, PEER: 1}
EACH_ROW = "({k: v[i] for k, v in s.items()} for i in range(len(ss)))"
OPERATIONS = (
    Operation("rows 8 to 16", "d.rows[8:16]", "{k: v[8:16] for k, v in s.items()}", "td[8:16]"),
    Operation("one row", "d.rows[3]", "{k: v[3] for k, v in s.items()}", "td[3]"),
    Operation(f"each of {ROWS} rows", "d.rows", EACH_ROW, "td", timed="for row in {}: pass", result="list({})"),
    Operation(f"stack {ROWS}", "stack(ds)", "{k: torch.stack([s[k] for s in ss]) for k in ss[0]}", "torch.stack(tds)"),
)


# What a sample of `collate` in the main process is, beside default_collate, and how many times as long ours may take.
COLLATED: dict[str, tuple[Callable[[int], Mapping[str, Any]], float]] = {
    "1 label": (lambda i: {"label": i % 10}, 2),
    "1 image 3 x 32 x 32": (lambda i: {"image": torch.rand(3, 32, 32)}, 1.5),
    "1 image and 1 label": (lambda i: {"image": torch.rand(3, 32, 32), "label": i % 10}, 1.5),
    "3 x 128 int64": (lambda i: {key: torch.arange(128) for key in ("input_ids", "attention_mask", "labels")}, 1.5),
    "8 x 64 float32": (lambda i: {f"k{j}": torch.rand(64) for j in range(8)}, 1.5),
    "1 image 3 x 224 x 224": (lambda i: {"image": torch.randint(255, (3, 224, 224), dtype=torch.uint8)}, 1.05),
}


@dataclass(frozen=True)
class ByHand:
    """A sample that default_collate does not take, the options of `collate`, and what a user writes instead."""

    sample: Callable[[int], Mapping[str, Any]]
    pad: Mapping[str, int] | None
    code: str
    most: float  # how many times as long ours may take


WORDS = "a photo of a cat"
PADDED = "{k: pad_sequence([torch.as_tensor(s[k]) for s in samples], True) for k in ('ids', 'mask')}"
TEXT = "'caption': utf8.encode([s['caption'] for s in samples])"
IMAGE = "'image': torch.stack([s['image'] for s in samples]), 'label': torch.tensor([s['label'] for s in samples])"
BY_HAND = {
    "1 caption": ByHand(lambda i: {"caption": WORDS + "s" * i}, None, "{" + TEXT + "}", 2),
    "1 image, 1 label and 1 caption": ByHand(
        lambda i: {"image": torch.rand(3, 32, 32), "label": i % 10, "caption": WORDS + "s" * i},
        None,
        "{" + IMAGE + ", " + TEXT + "}",
        2,
    ),
    "2 padded lists of 32 to 94": ByHand(
        lambda i: {"ids": list(range(32 + 2 * i)), "mask": [1] * (32 + 2 * i)}, {"ids": 0, "mask": 0}, PADDED, 1
    ),
    "2 padded tensors of 32 to 94": ByHand(
        lambda i: {k: torch.arange(32 + 2 * i) for k in ("ids", "mask")}, {"ids": 0, "mask": 0}, PADDED, 1.5
    ),
}


class Bench:
    """Run the parts. Keep the results, and the contenders that were left out."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.lines: list[dict[str, Any]] = []
        self.left_out: dict[str, str] = {}

    def leave_out(self, where: str, who: str, error: Exception) -> None:
        """Leave out a peer that fails, and report the reason. An error of our own contender is raised."""
        if who == OURS:
            raise error
        self.left_out[f"{who} in {where}"] = cause(error)

    def loaders(self, where: str, size: Size, workers: int) -> dict[str, Iterator[Any]]:
        """Endless batches of each contender. First asserts that the first batches are equal."""
        expected = default_collate(size.samples(ROWS))
        out: dict[str, Iterator[Any]] = {}
        for one in CONTENDERS:
            if TensorDict is None and one.name.startswith(PEER):
                continue
            try:
                batches = batches_of(one, size, workers)
                first = next(batches)
                if isinstance(first, Tensor):
                    right = torch.equal(first, torch.cat([field.flatten(1) for field in expected.values()], 1))
                else:
                    right = same(expected, dict(first.items()))
                assert right, "gives another batch"
            except Exception as error:
                self.leave_out(where, one.name, error)
                continue
            if one.name == OURS:
                shared = all(field.is_shared() for field in first.values())
                large = bool(workers) and not goes_by_value(first.nbytes)
                assert type(first) is DeviceDict and first.is_packed and shared == large, where
            out[one.name] = batches
        return out

    def load(self, name: str, size: Size, workers: int, goals: Goals) -> None:
        operation = f"load, {workers} worker{'' if workers == 1 else 's'}"
        loaders = self.loaders(f"{operation}, {name}", size, workers)
        seconds = seconds_of(loaders, self.rounds, workers)
        self.keep(operation, name, seconds, goals)

    def rows(self) -> None:
        """Rows of batches, and batches of rows, without a loader."""
        cases = {}
        for count in (8, 100):
            known = scope(Size(count, (2,)))
            for one in OPERATIONS:
                results = {who: plain(eval(one.result.format(code), known)) for who, code in one.codes().items()}
                for who, result in results.items():
                    assert same(results[DICT], result), f"{one.name}, {count} fields: {who} gives another result"
                timers = {who: Timer(one.timed.format(code), globals=known) for who, code in one.codes().items()}
                cases[one.name, f"{count} x 2 float32"] = timers
        for (operation, name), seconds in interleaved(cases, self.rounds).items():
            self.keep(operation, name, seconds, AS_LOOP)

    def collated(self) -> None:
        """`collate` beside default_collate, without a loader."""
        cases = {}
        for name, (sample, _) in COLLATED.items():
            samples = [sample(i) for i in range(ROWS)]
            made = collate(samples)
            assert made.is_packed and same(default_collate(samples), dict(made.items())), name
            known = {"samples": samples, "collate": collate, "default_collate": default_collate}
            timers = {
                OURS: Timer("collate(samples)", globals=known),
                DICT: Timer("default_collate(samples)", globals=known),
            }
            cases[f"collate {ROWS}", name] = timers
        for (operation, name), seconds in interleaved(cases, self.rounds).items():
            self.keep(operation, name, seconds, {DICT: 1 / COLLATED[name][1]})

    def by_hand(self) -> None:
        """`collate` of strings and of ragged samples, beside code without it."""
        cases = {}
        for name, one in BY_HAND.items():
            samples = [one.sample(i) for i in range(ROWS)]
            known = {"samples": samples, "pad": one.pad, "collate": collate, "torch": torch, "utf8": Utf8()}
            known["pad_sequence"] = pad_sequence
            made = collate(samples, pad=one.pad)
            assert made.is_packed and same(eval(one.code, known), dict(made.items())), name
            timers = {
                OURS: Timer("collate(samples, pad=pad)", globals=known),
                "by hand": Timer(one.code, globals=known),
            }
            cases[f"collate {ROWS}", name] = timers
        for (operation, name), seconds in interleaved(cases, self.rounds).items():
            self.keep(operation, name, seconds, {"by hand": 1 / BY_HAND[name].most})

    def keep(self, operation: str, name: str, seconds: Seconds, goals: Goals) -> None:
        ratios = {who: ratio(times, seconds[OURS]) for who, times in seconds.items()}
        goals = {who: least for who, least in goals.items() if who in ratios}
        met = [
            {"ours": OURS, "against": who, "least": least, "met": ratios[who]["median"] >= least}
            for who, least in goals.items()
        ]
        medians = {who: median(times) for who, times in seconds.items()}
        line = {"operation": operation, "fields": name, "median_seconds": medians, "ratios": {OURS: ratios}}
        self.lines.append({**line, "goals": met})

    def descriptors(self) -> dict[str, Any]:
        """The number of file descriptors that a process adds when it holds batches of a worker."""
        size, goal, growth = Size(50, (16,)), HELD + 16, {}
        where = f"file descriptors of {HELD} batches of {size.count} fields"
        for who, batches in self.loaders(where, size, 1).items():
            try:
                gc.collect()  # batches in reference cycles keep file descriptors too
                before = len(os.listdir("/dev/fd"))
                held = [next(batches) for _ in range(HELD)]
                growth[who] = len(os.listdir("/dev/fd")) - before
                del held
            except Exception as error:  # a peer may need more file descriptors than the system allows
                self.leave_out(where, who, error)
        return {"batches": HELD, "fields": size.count, "growth": growth, "goal": goal, "met": growth[OURS] <= goal}


def batches_of(one: Contender, size: Size, workers: int) -> Iterator[Any]:
    """Endless batches, so that the workers live as long as the iterator."""
    turns = cycle([range(ROWS), range(ROWS, 2 * ROWS)])
    samples = Samples(size, one.sample)
    return iter(DataLoader(samples, batch_sampler=turns, num_workers=workers, collate_fn=one.collate))


def per_batch(batches: Iterator[Any], count: int) -> float:
    """The mean seconds per batch over ``count`` batches. Each batch is dropped before the next is taken."""
    for _ in range(WARM):
        next(batches)
    start = perf_counter()
    for _ in range(count):
        next(batches)
    return (perf_counter() - start) / count


def seconds_of(loaders: Mapping[str, Iterator[Any]], rounds: int, workers: int) -> Seconds:
    """The seconds per batch of each contender, in every round."""
    counts = {who: max(WARM, round(SECONDS / per_batch(loader, WARM))) for who, loader in loaders.items()}
    seconds: Seconds = {who: [] for who in loaders}
    for i in range(rounds):
        for who in in_turn(loaders, i):
            seconds[who].append(per_batch(loaders[who], counts[who]))
            sleep(2 * workers * seconds[who][-1])  # the workers prefetch the next batches, and then they wait
    return seconds


def scope(size: Size) -> dict[str, Any]:
    """The variables of the statements: the samples and the batch of each contender."""
    ss = size.samples(ROWS)
    known = {"torch": torch, "stack": stack, "ss": ss, "s": default_collate(ss)}
    known |= {"ds": list(map(DeviceDict, ss)), "d": collate(ss)}
    if TensorDict is not None:
        known["tds"] = list(map(as_peer, ss))
        known["td"] = torch.stack(known["tds"])
    return known


def plain(x: Any) -> Any:
    return list(map(plain, x)) if isinstance(x, list) else dict(x.items())


def overlap(device: torch.device, rounds: int) -> dict[str, Any]:
    """The share of the copy time that ``prefetch`` overlaps with compute of about the same length."""
    samples = Size(20, (512, 1024)).samples(4)
    batches = [DeviceDict(sample).pack().pin_memory() for sample in samples]  # 40 MB each
    assert all(batch.is_packed and batch.is_pinned() for batch in batches)
    loader = [batches[i % len(batches)] for i in range(STEPS)]
    dicts = [dict(batch.items()) for batch in loader]  # the same pinned fields
    pairs = [(next(iter(batch.values())).view(-1, 3, 64, 64), torch.zeros(1).pin_memory()) for batch in loader]
    square = torch.rand(1024, 1024, device=device)
    into = torch.empty_like(square)
    total = torch.zeros(1024, device=device)
    resident = batches[0].to(device)

    def compute(batch: Mapping[str, Tensor], times: int) -> None:
        total.add_(batch["k0"][0])
        for _ in range(times):
            torch.mm(square, square, out=into)

    known = {"loader": loader, "device": device, "prefetch": prefetch, "resident": resident, "compute": compute}
    known |= {"synchronize": torch.get_device_module(device).synchronize, "square": square, "into": into}
    known |= {"torch": torch, "DeviceDict": DeviceDict, "dicts": dicts, "pairs": pairs}
    known |= {"PyG": PyG, "timm": timm}
    codes = {
        "copy": "for batch in loader: batch.to(device, non_blocking=True)",
        "compute": "for batch in loader: compute(resident, times)",
        "prefetch": "for batch in prefetch(loader, device): compute(batch, times)",
        "plain loop": "for batch in loader: compute(batch.to(device, non_blocking=True), times)",
        "plain dicts": "for d in dicts: compute({k: v.to(device, non_blocking=True) for k, v in d.items()}, times)",
        # The peers copy what they take: dicts field by field, and a pair of one tensor and a target.
        "prefetch of plain dicts": "for batch in prefetch(dicts, device): compute(batch, times)",
        "PyG's PrefetchLoader": "for batch in PyG(dicts, device): compute(batch, times)",
        "timm's PrefetchLoader": "for x, _ in timm(pairs, device=device): compute({'k0': resident['k0']}, times)",
    }
    left_out: dict[str, str] = {}

    def timer(code: str) -> Timer:  # the clock of Timer would synchronize with the device once more
        return Timer(f"{code}\nsynchronize()", setup="synchronize()", timer=perf_counter, globals=known)

    for batch, sample in zip(prefetch(loader, device), samples, strict=False):
        assert batch.device == resident.device and same(sample, dict(batch.cpu().items())), "gives another batch"
    copied = timer(codes["copy"]).blocked_autorange(min_run_time=1).median / STEPS
    multiplied = timer("for _ in range(1000): torch.mm(square, square, out=into)").blocked_autorange().median / 1000
    known["times"] = max(1, round(copied / multiplied))
    for who in [who for who in codes if "PrefetchLoader" in who]:
        try:
            if (PyG if "PyG" in who else timm) is None:
                raise ImportError("it is not installed")
            exec(codes[who], dict(known))
        except Exception as error:
            left_out[who] = cause(error)
            del codes[who]
    seconds = interleaved({"": {who: timer(code) for who, code in codes.items()}}, rounds)[""]
    hidden = {}
    for who in codes:
        if who in ("copy", "compute"):
            continue
        steps = list(zip(seconds["copy"], seconds["compute"], seconds[who], strict=True))
        shares = [(copy + work - loop) / min(copy, work) for copy, work, loop in steps]
        hidden[who] = {"median": median(shares), "min": min(shares), "max": max(shares)}
    line = {
        "operation": "a step whose batch is copied",
        "fields": f"{len(batches[0])} fields, {batches[0].nbytes / 1e6:.0f} MB",
        "median_seconds": {who: median(times) / STEPS for who, times in seconds.items()},
        "ratios": {"prefetch": {who: ratio(times, seconds["prefetch"]) for who, times in seconds.items()}},
        "goals": [],
    }
    return {
        "line": line,
        "batch_bytes": batches[0].nbytes,
        "fields": len(batches[0]),
        "median_step_seconds": line["median_seconds"],
        "hidden": hidden,
        "goal": 0.95,
        "met": hidden["prefetch"]["median"] >= 0.95,
        "left_out": left_out,
        # A training step with prefetched DeviceDicts, and with plain dicts in a loop with pinned memory.
        "step_goal": 1,
        "step_met": line["ratios"]["prefetch"]["plain dicts"]["median"] >= 1,
    }


def shown(r: Mapping[str, float]) -> str:
    return f"{r['median']:7.3f} ({r['min']:.3f}..{r['max']:.3f})"


def yes(met: bool) -> str:
    return "yes" if met else "NO"


def table(lines: list[dict[str, Any]]) -> str:
    """A line for each contender: its time as a multiple of ours, and its goal."""
    rows = [["operation", "fields", "contender", "a second", f"/ {OURS}", "goal", "met"]]
    for one in lines:
        where = [one["operation"], one["fields"]]
        goals = {goal["against"]: goal for goal in one["goals"]}
        for who, seconds in one["median_seconds"].items():
            goal = goals.get(who)
            met = ["", ""] if goal is None else [f">= {goal['least']:.3g}", yes(goal["met"])]
            rows.append([*where, who, f"{1 / seconds:8.0f}", shown(one["ratios"][OURS][who]), *met])
            where = ["", ""]
    return aligned(rows)


def main() -> None:
    args = parser("A DataLoader of samples with many fields, beside a plain dict and TensorDict.").parse_args()
    torch.set_num_threads(1)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a batch of 200 fields needs 200 if it is not packed
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = None if accelerator is None else torch.empty(0, device=accelerator).device
    gpu = None if device is None else getattr(torch.get_device_module(device), "get_device_name", str)(device)
    measured = setting(tensordict=TensorDict) | ({"gpu": gpu} if gpu else {})
    print(", ".join(f"{what} {name or 'is not installed, it is left out'}" for what, name in measured.items()))
    print(f"median (least..greatest) of {args.rounds} ratios of times; above 1 ours is faster\n", flush=True)

    bench = Bench(args.rounds)
    for workers, goals in WORKERS.items():
        for name, (size, of_size) in LOADED.items():
            bench.load(name, size, workers, of_size if goals is None else goals)
    bench.rows()
    bench.collated()
    bench.by_hand()
    print(table(bench.lines), flush=True)

    held = bench.descriptors()
    print(f"\nfile descriptors for {held['batches']} batches of {held['fields']} fields from a worker:")
    print(", ".join(f"{who} {growth}" for who, growth in held["growth"].items()), end="; ")
    print(f"goal: ours <= {held['goal']}: {yes(held['met'])}")

    overlapped = None
    if device is None:
        print("\nthere is no accelerator here, copies behind compute are left out")
    else:
        overlapped = overlap(device, args.rounds)
        steps = overlapped["median_step_seconds"].items()
        print(f"\na step, of {overlapped['batch_bytes'] / 1e6:.0f} MB in {overlapped['fields']} fields, in ms:")
        print(", ".join(f"{who} {1000 * seconds:.3f}" for who, seconds in steps))
        shares = ", ".join(f"{who} {shown(share)}" for who, share in overlapped["hidden"].items())
        print(f"share of the copy that is hidden: {shares}")
        print(f"goal: prefetch >= {overlapped['goal']}: {yes(overlapped['met'])}")
        print(f"goal: plain dicts / prefetch >= {overlapped['step_goal']}: {yes(overlapped['step_met'])}")
        bench.left_out |= overlapped.pop("left_out")
        bench.lines.append(overlapped.pop("line"))  # for the plot
    for what, reason in bench.left_out.items():
        print(f"left out: {what}: {reason}")
    results = {"rounds": args.rounds, "left_out": bench.left_out, "results": bench.lines}
    parts = {"file_descriptors": held, "prefetch": overlapped}
    write(args.json, {**measured, "device": None if device is None else str(device), "gpu": gpu, **results, **parts})


if __name__ == "__main__":
    main()
