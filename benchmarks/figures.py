"""Write the tables of the pages, and the chart of README.md, from the committed results.

    python benchmarks/figures.py

A table stands behind a line ``<!-- figures: NAME -->``. TABLES in this file has its rows and columns, by that name.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from harness import DICT, OURS, PEER, code_lines

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
EXAMPLES = ROOT / "examples"
WITH_TABLES = ("performance", "engines", "gallery", "recipes", "crashes")
PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{page}.md" for page in WITH_TABLES)]
CHART = ROOT / "docs" / "charts" / "loader-bars.svg"
MARKED = re.compile(r"(<!-- figures: (\w+) -->\n\n)((?:\|.*\n)*)\n?")

Rows = list[list[str]]
Line = dict[str, Any]


@cache
def results(name: str) -> dict[str, Any]:
    """The results of a program, on the CPU unless the name says ``-gpu``."""
    file = name if name.endswith("-gpu") else f"{name}-cpu"
    return json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))


def lines(name: str, operations: Iterable[str] = (), fields: Iterable[str] = ()) -> list[Line]:
    """The lines of a result file for these operations, in this order, and for these fields. Without them, all lines."""
    every: list[Line] = results(name)["results"]
    found = [line for operation in operations for line in every if line["operation"] == operation] or every
    return [line for line in found if not fields or line["fields"] in fields]


def line(name: str, operation: str, *fields: str) -> Line:
    (only,) = lines(name, [operation], fields)
    return only


def number(value: float) -> str:
    """Two significant digits, without an exponent."""
    rounded = float(f"{value:.2g}")
    if rounded >= 10:
        return f"{rounded:.0f}"
    return f"{rounded:.1f}" if rounded >= 1 else f"{rounded:.2g}"


def span(values: Iterable[float]) -> str:
    """The smallest and the largest value; one number if both are shown alike."""
    found = sorted(values)
    least, most = number(found[0]), number(found[-1])
    return least if least == most else f"{least} to {most}"


# --- tables with a row for each line of the results, and a column for each contender ---

PER_SECOND = {"(µs)": 1e6, "(ms)": 1e3}


def cell(line: Line, header: str, *whos: str) -> str:
    """The median of a contender in the unit that ends the header; without a unit, its ratio to the reference.

    Of several contenders it is the first one of the line. A cell without a contender is empty.
    """
    scale = PER_SECOND.get(header.rpartition(" ")[2])
    for who in whos:
        if who in line["ratios"]:
            return number(line["ratios"][who]["median"] if scale is None else scale * line["medians"][who])
    return ""


@dataclass(frozen=True)
class Table:
    """The results of a file, or of some of its operations and fields."""

    results: str
    labels: Mapping[str, str]
    """The columns on the left: by the header, the entry of a line."""
    columns: Mapping[str, str | tuple[str, ...]]
    """By the header: the contender, or the contenders of which a line has one."""
    operations: Sequence[str] = ()
    fields: Sequence[str] = ()

    def __call__(self) -> Rows:
        found = [[*self.labels, *self.columns]]
        for line in lines(self.results, self.operations, self.fields):
            cells = (cell(line, head, *([who] if isinstance(who, str) else who)) for head, who in self.columns.items())
            found.append([*(line[entry] for entry in self.labels.values()), *cells])
        return found


OPERATION = {"operation": "operation"}
OPERATION_FIELDS = {"operation": "operation", "fields": "fields"}
CONSOLIDATED = {"TensorDict (x)": "TensorDict consolidated"}
ON_PAGE = (
    "`.to()` on the current device", "cast of every tensor", "`numpy`", "clone", "read one field", "write 80 fields",
    "construct", "one row", "stack 32 dicts", "1000 strings in", "1000 strings out", "import after torch",
)  # fmt: skip
BESIDE_FORMATS = ("write", "256 rows", "4096 rows")
LOADED = ("8 x 64 float32", "40 x 16 float32", "200 x 4 float32", "4 images")
RECEIVE = [f"receive a batch from a worker, `{strategy}`" for strategy in ("file_descriptor", "file_system")]
IN_README = Table(
    "peers",
    OPERATION,
    {"DeviceDict (µs)": OURS, "plain dict and a loop (µs)": DICT, "tensordict (µs)": PEER},
    (
        "read one field", "write 80 fields", "construct", "cast of every tensor", "clone", "stack 32 dicts",
        *RECEIVE,
    ),
)  # fmt: skip
FROM_RESULTS = {
    "operations": Table(
        "peers",
        OPERATION,
        {"DeviceDict (µs)": OURS, "dict (x)": DICT, "TensorDict (x)": PEER}
        | {"tianshou (x)": "tianshou Batch", "HF (x)": "BatchFeature"},
        ON_PAGE,
    ),
    "processes": Table(
        "peers",
        OPERATION,
        {"dict (x)": DICT, "joined by hand (x)": "dict, packed", "TensorDict (x)": PEER},
        (*RECEIVE, "send a batch through a queue"),
    ),
    "packing": Table(
        "transfer",
        OPERATION_FIELDS,
        {"unpacked (x)": ("loop of clones", OURS), **CONSOLIDATED},
        fields=("40 x 2 KB", "200 x 2 KB"),
    ),
    "loader": Table(
        "loader",
        {"fields": "fields"},
        {"plain dicts (x)": DICT, **CONSOLIDATED},
        ("load, 1 worker",),
        LOADED,
    ),
    "disk": Table(
        "disk",
        OPERATION_FIELDS,
        {"safetensors (x)": "safetensors", "`torch.save` (x)": "`torch.save`", "`memmap` (x)": "TensorDict `memmap`"},
    ),
    "rows": Table(
        "rows",
        {"operation": "operation", "rows": "fields"},
        {"loop (x)": "loop", "TensorDict (x)": PEER, "tianshou (x)": "tianshou Batch"}
        | {"NumPy (x)": "NumPy structured", "HF (x)": "HF datasets"},
    ),
    "tables": Table(
        "table",
        {"operation": "operation", "table": "fields"},
        {
            "like (x)": "TensorDict memmap_like",
            "fsync (x)": "TensorDict memmap_like, synced",
            "append (x)": "TensorDict append_memmap",
            "NumPy (x)": "NumPy memmap",
            "h5py (x)": "h5py",
            "HF (x)": "HF datasets",
        },
        BESIDE_FORMATS,
    ),
    "sequences": Table(
        "ragged",
        OPERATION_FIELDS,
        {"by hand (x)": "by hand", "index (x)": "index of every value", "nested (x)": "nested tensors"}
        | {"TensorDict (x)": PEER, "padded (x)": "padded"},
    ),
    "engines": Table(
        "engines",
        {"operation": "operation", "size": "fields"},
        {
            "packed (ms)": "DeviceDict, packed",
            "not packed (x)": OURS,
            "arrays (x)": "NumPy arrays",
            "tensors (x)": "tensors",
            "TensorDict (x)": PEER,
        },
        fields=("40 of 2 KB", "4 of 10 MB"),
    ),
    "recipes": Table(
        "tasks",
        {"recipe": "operation"},
        {"DeviceDict (µs)": OURS, "plain dicts (µs)": DICT},
        fields=("recipe",),
    ),
}


# --- other tables ---


def descriptors() -> Rows:
    growth = line("loader", "hold 64 batches")["medians"]
    named = {"packed batches of `collate`": OURS, "plain dicts": DICT}
    head = ["64 held batches of 50 fields", "file descriptors"]
    return [head, *([label, f"{growth[who]:.0f}"] for label, who in named.items())]


def memory() -> Rows:
    """The most memory of each operation, as a multiple of the data, with a column for each contender."""
    found = [["operation", "DeviceDict", "plain dicts", "TensorDict"]]
    for one in lines("memory"):
        if one["unit"] == "of the data":
            found.append([one["operation"], *(number(one["medians"][who]) for who in (OURS, DICT, PEER))])
    return found


KEPT = {
    "DeviceDict (KB)": OURS,
    "torch (KB)": DICT,
    "`lazy_stack` (KB)": "TensorDict lazy_stack",
    "`consolidate` (KB)": "TensorDict consolidated",
}


def kept() -> Rows:
    """What a list of labels keeps alive, with a column for each way to make a batch."""
    found = [["loader", *KEPT]]
    for one in lines("memory"):
        what, _, where = one["operation"].partition(", ")
        if what.startswith("keep"):
            found.append([where, *(number(one["medians"][who] / 1000) for who in KEPT.values())])
    return found


def gpu() -> Rows:
    """The least times of moves to a GPU and back."""
    found = [["move", "fields", "DeviceDict (µs)", "loop (µs)"]]
    for operation in ON_GPU:
        for line in lines("moves-gpu", [operation], GPU_SIZES):
            times = [number(1e6 * line["minima"][who]) for who in (OURS, "loop")]
            found.append([operation, line["fields"], *times])
    return found


ON_GPU = (
    "to the device", "to the device, from pinned memory, of `collate`", "to the host, of `collate`",
    "a training step", "a training step, from pinned memory",
)  # fmt: skip
GPU_SIZES = ("8 x 2 KB", "40 x 2 KB", "40 x 200 KB", "4 x 2 MB")


def speed() -> Rows:
    """Times in µs, and the last row of `kept`."""
    (_, *heads), *times = IN_README()
    ours, plain, _, peer = kept()[-1][1:]
    memory = ["memory that labels of 20 batches hold (KB)", ours, plain, peer]
    return [["operation, µs", *(head.removesuffix(" (µs)") for head in heads)], *times, memory]


def ranks() -> Rows:
    """The times of the loop, with a column for each operation."""
    verbs = list(dict.fromkeys(line["operation"] for line in results("distributed")["results"]))
    found = [["fields", *(f"{verb} (x)" for verb in verbs)]]
    for fields in ("10 of 64 B", "100 of 64 B", "4 of 4 MB"):
        found.append(
            [fields, *(number(line("distributed", verb, fields)["ratios"]["loop"]["median"]) for verb in verbs)]
        )
    return found


OUTCOMES = {
    "trains": "trains",
    "has no gradients": "no error, but no gradients",
    "gradients are not synchronised": "no error, but gradients are **not synchronized**",
}


def outputs() -> Rows:
    """A row for each way to train, a column for all containers with the same outcomes."""
    found = results("outputs")["results"]
    columns: dict[tuple[str, ...], list[str]] = {}
    for who in found["DDP"]:
        said: list[str] = [shown[who] for shown in found.values()]
        outcomes = tuple(OUTCOMES.get(one, one.partition(":")[0]) for one in said)
        columns.setdefault(outcomes, []).append(who)
    lines = [["trained with", *(", ".join(whos) for whos in columns.values())]]
    ways = [way.replace("find_", "").replace("_", " ") for way in found]  # long names make a wide table
    return lines + [[way, *cells] for way, *cells in zip(ways, *columns, strict=True)]


ARITHMETIC = ("`lerp_`", "`add_`", "`copy_`", "`zero_`")
# Where other code takes less time than ours: the label, what the other code is and its contender, and the operations.
SLOWER: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("`DeviceDict(d)`: every value is validated", "a plain dict", DICT, "peers", ("construct",)),
    ('`d["x"] = tensor`: the tensor is validated', "a plain dict", DICT, "peers", ("write 80 fields",)),
    ('`"x" in d`: paths are accepted', "a plain dict", DICT, "peers", ("find a key",)),
    ('`d["x"]`: as in every subclass of dict', "a plain dict", DICT, "peers", ("read one field",)),
    ("`d.x` of a typed dict", '`d["x"]` of a plain dict', DICT, "peers", ("read an attribute",)),
    ("`rows[i]`, `rows[a:b]`: sizes are compared", "a loop", DICT, "peers", ("rows 8 to 16", "one row")),
    ("`lerp_`, `add_`, `copy_`, `zero_` of 400 small fields", "a loop", DICT, "peers", ARITHMETIC),
    (
        "`lerp_`, `add_`, `copy_`, `zero_` of 400 small fields",
        "TensorDict, which checks less",
        PEER,
        "peers",
        ARITHMETIC,
    ),
    ("`collate` in the main process", "`default_collate`", DICT, "loader", ("load, 0 workers",)),
    ("`pack`", "a loop of clones", "loop of clones", "transfer", ("pack",)),
]


def slower() -> Rows:
    """The time of the other code as a multiple of ours, on all sizes."""
    found = [["operation", "beside", "its time (x)"]]
    for label, beside, who, name, operations in SLOWER:
        found.append([label, beside, span(line["ratios"][who]["median"] for line in lines(name, operations))])
    return found


def definitions(path: Path) -> dict[str, tuple[int, set[str]]]:
    """For each definition of a file: its lines of code, and the names that it uses."""
    source = path.read_text(encoding="utf-8")
    code, tree = code_lines(source).keys(), ast.parse(source)
    found: dict[str, tuple[int, set[str]]] = {}
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names, first = [node.name], min([node.lineno, *(one.lineno for one in node.decorator_list)])
        elif isinstance(node, ast.Assign):
            names = [one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)]
            first = node.lineno
        else:
            continue
        count = len(code & {*range(first, (node.end_lineno or 0) + 1)})
        used = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
        for i, name in enumerate(names):
            found[name] = (0 if i else count, used)
    return found


def reached(found: dict[str, tuple[int, set[str]]], names: set[str]) -> set[str]:
    """These definitions and all that they use, in the same file."""
    while more := {used for name in names & found.keys() for used in found[name][1]} - names:
        names = names | more
    return names & found.keys()


def lines_of(name: str) -> tuple[int, int]:
    """The lines of an example and of its program with plain dicts: ``run``, and the definitions that it uses.

    What the plain program imports from the example, and what that uses, is the same in both. It does not count.
    """
    plain = EXAMPLES / f"plain_{name}.py"
    mine, other = definitions(EXAMPLES / f"{name}.py"), definitions(plain)
    imports = [node for node in ast.parse(plain.read_text("utf-8")).body if isinstance(node, ast.ImportFrom)]
    shared = reached(mine, {alias.name for node in imports if node.module == name for alias in node.names} - {"main"})
    return (
        sum(mine[one][0] for one in reached(mine, {"run"}) - shared),
        sum(other[one][0] for one in reached(other, {"run"})),
    )


def order() -> Rows:
    """A row for each contender that stands beside an order, with the values of both."""
    found = [["operation", "ours", "beside", "its value"]]
    for one in lines("order"):
        (own, value), *others = one["medians"].items()
        operation = one["operation"] if own == "BatchOrder" else f"{one['operation']}: {own}"
        operation, shown = (
            (f"{operation} (s)", number) if one["unit"] == "seconds" else (f"{operation} (%)", "{:.2f}".format)
        )
        found += [[operation, shown(value), who, shown(other)] for who, other in others]
    return found


def tasks() -> Rows:
    """What else a table can do: a row for each contender that stands beside it."""
    found = [["operation", "time (ms)", "beside", "its time (x)"]]
    for one in lines("table"):
        own, *others = one["medians"]
        if one["operation"] not in BESIDE_FORMATS:
            time = number(1e3 * one["medians"][own])
            found += [[one["operation"], time, who, number(one["ratios"][who]["median"])] for who in others]
    return found


PROGRAMS = {
    "[Image classifier](#image-classifier-with-ragged-boxes)": "classifier",
    "[PPO](#ppo-with-a-rollout-buffer)": "ppo",
    "[Fine-tuning](#fine-tuning-of-a-hugging-face-model)": "finetune",
    "[Packed texts](#packed-texts)": "packed",
    "[Moving average and checkpoint](#moving-average-and-checkpoint)": "checkpoint",
    "[Model soup](#model-soup)": "soup",
    "[Table in memory](#a-table-of-two-million-rows-in-memory)": "rows",
    "[Table larger than memory](#a-table-larger-than-memory)": "table",
    "[Typed batches](#typed-batches)": "typed",
    "[Penguins](#penguins)": "penguins",
    "[Penguins on two processes](#penguins)": "ddp_penguins",
}


def programs() -> Rows:
    """Whole examples beside the same programs with plain dicts: lines of code, and time."""
    found = [["example", "lines", "plain: lines", "time (s)", "plain (x)"]]
    for label, name in PROGRAMS.items():
        of = line("gallery", name)
        times = [number(of["medians"][OURS]), f"{of['medians'][DICT] / of['medians'][OURS]:.2f}"]
        found.append([label, *map(str, lines_of(name)), *times])
    return found


def ten_tasks() -> Rows:
    """Lines and times of each task of `bench_tasks.py`. Lines that two versions share do not count."""
    found = [["task", "lines", "plain: lines", "TensorDict: lines", "time (ms)", "plain (x)", "TensorDict (x)"]]
    defined = definitions(ROOT / "benchmarks" / "bench_tasks.py")
    for one in lines("tasks"):
        if (name := one["fields"]) != "recipe":
            own, *others = (reached(defined, {f"{kind}{name}"}) for kind in ("", "plain_", "peer_"))
            parts = [own - others[0], *(other - own for other in others)]
            counts = [str(sum(defined[part][0] for part in part_names)) for part_names in parts]
            medians = one["medians"]
            ratios = [number(medians[who] / medians[OURS]) if who in medians else "" for who in (DICT, PEER)]
            counts = [count if count != "0" else "" for count in counts]
            found.append([one["operation"], *counts, number(1e3 * medians[OURS]), *ratios])
    return found


TRIED = {
    "power": ("power failures: a state of the disk after any step of a writer", "a whole flush, whole columns"),
    "kills": ("`SIGKILL` at a random time", "the rows of the last `flush`, or of the one that was running"),
    "interrupts": ("`SIGINT` at a random time", "the same"),
    "bytecodes": ("an interrupt at each bytecode of `flush` and `close`", "a whole flush; the writer goes on"),
    "full disks": ("a full disk at each call of the system, twice in a row", "all rows, when there is room again"),
    "failed flushes": ("two or three failed flushes in a row, in any order", "all rows"),
    "loads": ("`load` and `verify` beside a writer that flushes", "a whole flush, no false alarm"),
    "inference mode": ("tests of tables in inference mode", "the same as without"),
    "default device": ("tests of tables with another default device", "the same as without"),
}
"""What the tests of tables count, and what is there afterwards."""


def trust() -> Rows:
    counts = results("trust")["results"]
    rows = [[tried, f"{counts[key]:,}", after] for key, (tried, after) in TRIED.items()]
    return [["what was tried", "how often", "afterwards"], *rows]


TABLES: dict[str, Callable[[], Rows]] = {
    **FROM_RESULTS,
    **{table.__name__: table for table in (descriptors, gpu, speed, memory, kept, ranks, tasks, order, outputs)},
    **{table.__name__: table for table in (slower, programs, ten_tasks, trust)},
}


def markdown(rows: Rows) -> str:
    """A Markdown table. A column whose cells are numbers is aligned to the right."""
    numeric = [all(re.fullmatch(r"[\d. to]*", cell) for cell in column[1:]) for column in zip(*rows, strict=True)]
    numeric[0] = False
    rule = "|" + "|".join("--:" if right else "---" for right in numeric) + "|"
    first, *others = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([first, rule, *others]).replace("|  ", "| ") + "\n"


def with_figures(page: str) -> str:
    """The text of a page with its tables made again."""
    return MARKED.sub(lambda found: found[1] + markdown(TABLES[found[2]]()) + "\n", page)


BARS = {
    "DeviceDict": OURS,
    "tensordict, consolidated": PEER,
    "plain dict": DICT,
    "BatchFeature": "BatchFeature",
    "tianshou Batch": "tianshou Batch",
}
WIDTH, LEFT, BAR, STEP, TOP = 640, 190, 20, 32, 52  # pixels


def bars() -> str:
    """The chart of the README: the time to receive a batch from a DataLoader worker, a bar for each container.

    The chart has a background of its own, so that it is legible on light and dark pages.
    """
    medians = line("peers", RECEIVE[0])["medians"]
    most = max(medians[who] for who in BARS.values())
    height = TOP + STEP * len(BARS) + 8
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="14" role="img">',
        "  <title>Time to receive a batch of 40 fields from a DataLoader worker</title>",
        "  <style>.p { fill: #ffffff; } text { fill: #24292f; } .o { fill: #8c959f; } .u { fill: #1b6ca8; }",
        "    @media (prefers-color-scheme: dark) { .p { fill: #161b22; } text { fill: #e6edf3; }",
        "      .o { fill: #6e7681; } .u { fill: #58a6ff; } }</style>",
        f'  <rect class="p" width="{WIDTH}" height="{height}" rx="6" />',
        '  <text x="16" y="30" font-weight="bold">Receive a batch of 40 fields from a DataLoader worker</text>',
    ]
    for i, (label, who) in enumerate(BARS.items()):
        y, width = TOP + STEP * i, (WIDTH - LEFT - 90) * medians[who] / most
        kind = "u" if who == OURS else "o"
        out += [
            f'  <text x="{LEFT - 10}" y="{y + 15}" text-anchor="end">{label}</text>',
            f'  <rect class="{kind}" x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2" />',
            f'  <text x="{LEFT + width + 8:.1f}" y="{y + 15}">{number(1e3 * medians[who])} ms</text>',
        ]
    return "\n".join([*out, "</svg>", ""])


def main() -> None:
    for page in PAGES:
        page.write_text(with_figures(page.read_text(encoding="utf-8")), encoding="utf-8")
    CHART.write_text(bars(), encoding="utf-8")


if __name__ == "__main__":
    main()
