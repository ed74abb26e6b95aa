"""Write the tables of the pages, and the chart of README.md, from the committed results.

    python benchmarks/figures.py

A table stands behind a line ``<!-- figures: NAME -->``. The function of that name in this file makes the table.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
EXAMPLES = ROOT / "examples"
PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{page}.md" for page in ("performance", "engines", "gallery"))]
CHART = ROOT / "docs" / "charts" / "loader-bars.svg"
MARKED = re.compile(r"(<!-- figures: (\w+) -->\n\n)((?:\|.*\n)*)\n?")

Rows = list[list[str]]


@cache
def results(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}-cpu.json").read_text(encoding="utf-8"))


def number(value: float) -> str:
    """Two significant digits, without an exponent."""
    rounded = float(f"{value:.2g}")
    if rounded >= 10:
        return f"{rounded:.0f}"
    return f"{rounded:.1f}" if rounded >= 1 else f"{rounded:.2g}"


def micro(seconds: float) -> str:
    return number(1e6 * seconds)


def span(values: Iterable[float]) -> str:
    """The smallest and the largest value; one number if both are shown alike."""
    found = sorted(values)
    least, most = number(found[0]), number(found[-1])
    return least if least == most else f"{least} to {most}"


def rows_of(name: str, operation: str, fields: Iterable[Any] | None = None) -> list[dict[str, Any]]:
    """The results of one operation, in the order of ``fields``."""
    found = [row for row in results(name)["results"] if row["operation"] == operation]
    return found if fields is None else [row for field in fields for row in found if row["fields"] == field]


def peer(operation: str) -> dict[str, Any]:
    (row,) = (row for row in results("peers")["results"] if row["operation"] == operation)
    return row


def times(operation: str, whos: Iterable[str]) -> list[str]:
    """The times of several containers as multiples of the time of DeviceDict. A missing contender has an empty cell."""
    ratios = peer(operation)["ratios"]
    return [number(ratios[who]["median"]) if who in ratios else "" for who in whos]


def against(name: str, operation: str, who: str, ours: str, fields: Any) -> str:
    """The time of another contender as a multiple of our time, of the results with two levels of ratios."""
    (row,) = rows_of(name, operation, [fields])
    return number(row["ratios"][ours][who]["median"]) if who in row["ratios"][ours] else ""


SPEED = {
    "`.to()` on the current device": "to(same device)",
    "read one field": "read",
    "write 80 fields": "write",
    "construct": "construct",
    "stack 32 dicts": "stack 32",
    "receive a batch from a DataLoader worker": "loader, 1 worker",
}


def speed() -> Rows:
    whos = ["DeviceDict", "dict", "TensorDict"]
    head = ["operation", "DeviceDict (µs)", "plain dict and a loop (µs)", "tensordict (µs)"]
    return [head, *([label, *(micro(peer(name)["medians"][who]) for who in whos)] for label, name in SPEED.items())]


OPERATIONS = {
    "`.to()` on the current device": "to(same device)",
    "cast of every tensor": "to(torch.float64)",
    "`numpy`": "numpy",
    "clone": "clone",
    "read one field": "read",
    "write 80 fields": "write",
    "construct": "construct",
    "one row": "one row",
    "stack 32 dicts": "stack 32",
    "1000 strings in": "1000 strings in",
    "1000 strings out": "1000 strings out",
    "import after torch": "import, beside torch",
}


def operations() -> Rows:
    whos = ["dict", "TensorDict", "tianshou Batch", "BatchFeature"]
    head = [
        "operation",
        "DeviceDict (µs)",
        "plain dict (x)",
        "TensorDict (x)",
        "tianshou's Batch (x)",
        "BatchFeature (x)",
    ]
    lines = [
        [label, micro(peer(name)["medians"]["DeviceDict"]), *times(name, whos)] for label, name in OPERATIONS.items()
    ]
    return [head, *lines]


def packing() -> Rows:
    lines = [["operation", "fields", "loop or unpacked (x)", "TensorDict, consolidated (x)"]]
    for label, operation, loop, fields in [
        ("pack", "pack", "loop of clones", "40 x 2 KB"),
        ("pack", "pack", "loop of clones", "200 x 2 KB"),
        ("unpickle from another process", "unpickle from another process", "ours unpacked", "40 x 2 KB"),
        ("unpickle from another process", "unpickle from another process", "ours unpacked", "200 x 2 KB"),
    ]:
        cells = [
            against("transfer", operation, who, "ours packed", fields) for who in (loop, "TensorDict consolidated")
        ]
        lines.append([label, fields.partition(" ")[0], *cells])
    return lines


def loader() -> Rows:
    lines = [["fields", "plain dicts and `default_collate` (x)", "TensorDict, consolidated (x)"]]
    for label, fields in [("8", "8 x 64 float32"), ("40", "40 x 16 float32"), ("200", "200 x 4 float32"),
                          ("4 images", "4 images")]:  # fmt: skip
        cells = [
            against("loader", "load, 1 worker", who, "ours", fields) for who in ("dict", "TensorDict consolidated")
        ]
        lines.append([label, *cells])
    return lines


def processes() -> Rows:
    whos = ["dict", "dict, packed", "TensorDict"]
    head = ["through", "plain dict (x)", "dict joined by hand (x)", "TensorDict, consolidated (x)"]
    names = {"a DataLoader worker": "loader, 1 worker", "a queue": "through a queue"}
    return [head, *([label, *times(name, whos)] for label, name in names.items())]


def descriptors() -> Rows:
    growth = results("loader")["file_descriptors"]["growth"]
    named = {"packed batches of `collate`": "ours", "plain dicts": "dict"}
    return [
        ["64 held batches of 50 fields", "file descriptors"],
        *([label, str(growth[who])] for label, who in named.items()),
    ]


def disk() -> Rows:
    lines = [["operation", "fields", "safetensors (x)", "`torch.save` (x)", "TensorDict `memmap` (x)"]]
    for operation in ("save", "load and read"):
        for row in rows_of("disk", operation, ["200 x 2 KB", "4 x 40 MB"]):
            ratios = [1 / row["ratios"][who]["median"] for who in ("safetensors", "torch.save", "TensorDict memmap")]
            lines.append([operation, row["fields"].replace(" x ", " of "), *map(number, ratios)])
    return lines


def tables() -> Rows:
    """Times of other formats as multiples of ours, for each operation on each of the two tables."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for line in results("table")["lines"]:
        if line["fields"] == "texts":
            continue
        operation = line["operation"].partition(",")[0].replace("write 256 at a time", "write")
        cells = found.setdefault((operation.replace("gather 256", "256 rows").replace("gather 4096", "4096 rows"),
                                  line["fields"]), {})  # fmt: skip
        cells |= {who: number(r["median"]) for who, r in line["ratios"].items()}
    whos = {
        "`memmap_like` (x)": ("TensorDict memmap_like", "TensorDict memmap"),
        "with fsync (x)": ("TensorDict memmap_like, synced",),
        "`append_memmap` (x)": ("TensorDict append_memmap",),
        "NumPy memmap (x)": ("NumPy memmap",),
        "h5py (x)": ("h5py",),
        "zarr (x)": ("zarr",),
        "HF datasets (x)": ("HF datasets",),
    }
    lines = [["operation", f"table of {results('table')['mib']} MiB", *whos]]
    for (operation, table), cells in found.items():
        lines.append([operation, table, *("".join(cells.get(who, "") for who in any_of) for any_of in whos.values())])
    return lines


def texts() -> Rows:
    """Rows of a jagged column of texts, beside two ways to read the same bytes by hand."""
    lines = [["operation", "index of every byte (x)", "a slice for each row (x)"]]
    for count in (256, 4096):
        found = {
            who: number(ratio["median"])
            for line in results("table")["lines"]
            if line["operation"].startswith(f"gather {count} and decode")
            for who, ratio in line["ratios"].items()
        }
        lines.append([f"{count} texts", found["index_select of bytes"], found["a slice for each row"]])
    return lines


def definitions(path: Path) -> dict[str, tuple[int, set[str]]]:
    """For each definition of a file: its lines of code, and the names that it uses.

    Blank lines, comments and docstrings are no lines of code.
    """
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    found: dict[str, tuple[int, set[str]]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names, first = [node.name], min([node.lineno, *(one.lineno for one in node.decorator_list)])
        elif isinstance(node, ast.Assign):
            names = [one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)]
            first = node.lineno
        else:
            continue
        left_out = {
            number
            for inner in ast.walk(node)
            if isinstance(inner, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(inner) is not None
            for number in range(inner.body[0].lineno, (inner.body[0].end_lineno or 0) + 1)
        }
        count = sum(
            number not in left_out and bool(line.strip()) and not line.strip().startswith("#")
            for number, line in enumerate(lines[first - 1 : node.end_lineno], first)
        )
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


PROGRAMS = {
    "[Image classifier](#image-classifier-with-ragged-boxes)": "classifier",
    "[PPO](#ppo-with-a-rollout-buffer)": "ppo",
    "[Fine-tuning](#fine-tuning-of-a-hugging-face-model)": "finetune",
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
    measured = {row["program"]: row for row in results("gallery")["programs"]}
    head = ["example", "lines with DeviceDict", "lines with plain dicts", "plain dicts (s)"]
    lines = [[*head, "time with DeviceDict (x)", "plain dicts again (x)"]]
    for label, name in PROGRAMS.items():
        row, counts = measured[name], map(str, lines_of(name))
        noise = f"{row['noise']['low']:.2f} to {row['noise']['high']:.2f}"
        seconds = number(row["median_seconds"]["dict"])
        lines.append([label, *counts, seconds, f"{row['ratios']['dict']['median']:.2f}", noise])
    return lines


def gallery() -> Rows:
    """Parts of the gallery's examples: our time as a multiple of that of plain dicts."""
    lines = [["part", "DeviceDict (µs)", "plain dicts (µs)", "ratio"]]
    for row in results("gallery")["results"]:
        seconds, middle = row["median_seconds"], row["ratios"]["dict"]["median"]
        lines.append([row["operation"], micro(seconds["ours"]), micro(seconds["dict"]), number(middle)])
    return lines


def rows() -> Rows:
    """Times of other containers as multiples of ours, for rows of a table in memory."""
    whos = {
        "loop of `index_select` (x)": "loop",
        "TensorDict (x)": "TensorDict",
        "tianshou's Batch (x)": "Batch",
        "NumPy structured (x)": "NumPy structured",
        "HF datasets (x)": "HF datasets",
    }
    lines = [["operation", "rows", *whos]]
    for row in results("rows")["results"]:
        ratios = row["ratios"]["ours"]
        cells = [number(ratios[who]["median"]) if who in ratios else "" for who in whos.values()]
        operation = re.sub(r"rows\[.*?\]( = \w+)?", r"`\g<0>`", row["operation"])
        lines.append([operation, row["fields"], *cells])
    return lines


def ranks() -> Rows:
    verbs = ["broadcast", "send, recv", "all_gather", "all_reduce"]
    lines = [["fields", *(f"`{verb}` (x)".replace(", ", "`, `") for verb in verbs)]]
    for fields in ("10 x 64 B", "100 x 64 B", "4 x 4 MB"):
        cells = [rows_of("distributed", verb, [fields])[0]["ratios"]["loop"]["median"] for verb in verbs]
        lines.append([fields.replace(" x ", " of "), *map(number, cells)])
    return lines


ENGINES = {
    "pickle protocol 5, out of band": ("pickle, out of band", "ours packed"),
    "pickle protocol 5, in band": ("pickle, in band", "ours packed"),
    "`ray.put`": ("ray.put", "ours packed"),
    "`ray.get`": ("ray.get", "ours packed"),
    "`ray.get` in `view_read_only`": ("ray.get", "ours packed, read-only"),
    "Dask: `scatter`, `gather(direct=True)`": ("Dask, direct", "ours packed"),
    "Dask: `scatter`, `gather`": ("Dask", "ours packed"),
}


def engines() -> Rows:
    """The time of a packed dict, and the times of other containers as multiples of it."""
    whos = ["ours", "NumPy arrays", "tensors", "TensorDict"]
    others = ["not packed (x)", "dict of NumPy arrays (x)", "dict of tensors (x)", "TensorDict (x)"]
    lines = [["operation", "tensors", "packed DeviceDict (ms)", *others]]
    for label, (operation, ours) in ENGINES.items():
        for row in rows_of("engines", operation):
            to_packed = {who: 1 / ratio["median"] for who, ratio in row["ratios"].items()} | {"ours packed": 1}
            cells = [number(to_packed[who] / to_packed[ours]) if who in to_packed else "" for who in whos]
            lines.append([label, row["fields"].replace(" x ", " of "), number(1e3 * row["medians"][ours]), *cells])
    return lines


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
        outcomes = tuple(OUTCOMES.get(shown[who], shown[who].partition(":")[0]) for shown in found.values())
        columns.setdefault(outcomes, []).append(who)
    lines = [["trained with", *(", ".join(whos) for whos in columns.values())]]
    return lines + [[way, *cells] for way, *cells in zip(found, *columns, strict=True)]


def slower() -> Rows:
    """Our time as a multiple of that of a plain dict or a loop."""
    lines = [["operation", "beside", "our time (x)"]]
    core = {
        "`DeviceDict(d)`: every value is validated": "construct",
        '`d["x"] = tensor`: the tensor is validated': "write",
        '`"x" in d`: paths are accepted': "membership",
        '`d["x"]`: as in every subclass of dict': "read",
    }
    for label, operation in core.items():
        found = rows_of("core", operation, [8, 100])
        lines.append([label, "a plain dict", span(row["ratios"]["dict"]["median"] for row in found)])
    found = rows_of("core", "attribute, typed", [8, 100])
    lines.append(["`d.x` of a typed dict", '`d["x"]`', span(row["ratios"]["ours[key]"]["median"] for row in found)])
    views = rows_of("loader", "rows 8 to 16") + rows_of("loader", "one row")
    shown = span(1 / row["ratios"]["ours"]["dict"]["median"] for row in views)
    lines.append(["`rows[i]`, `rows[a:b]`: sizes are compared", "a loop", shown])
    shown = span(1 / row["ratios"]["ours"]["dict"]["median"] for row in rows_of("loader", "load, 0 workers"))
    lines.append(["`collate` in the main process", "`default_collate`", shown])
    for label, operations, fields in [
        ("`lerp_`: all fields are checked first", ["lerp_ (EMA)"], 8),
        ("`add_`, `copy_`, `zero_`", ["add_ (mapping)", "copy_", "zero_"], 400),
    ]:
        chosen = [row for name in operations for row in rows_of("whole", name, [fields])
                  if row["ours"] == "DeviceDict" and row["size"] == "small"]  # fmt: skip
        lines.append(
            [f"{label}, {fields} small fields", "a loop", span(row["ratios"]["dict"]["median"] for row in chosen)]
        )
    shown = span(1 / row["ratios"]["ours packed"]["loop of clones"]["median"] for row in rows_of("transfer", "pack"))
    lines.append(["`pack`", "a loop of clones", shown])
    return lines


TABLES: dict[str, Callable[[], Rows]] = {
    table.__name__: table
    for table in (speed, operations, packing, loader, processes, descriptors, disk, rows, tables, texts, ranks, engines,
                  programs, gallery, outputs, slower)
}  # fmt: skip


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
    "DeviceDict": "DeviceDict",
    "tensordict, consolidated": "TensorDict",
    "plain dict": "dict",
    "BatchFeature": "BatchFeature",
    "tianshou Batch": "tianshou Batch",
}
WIDTH, LEFT, BAR, STEP, TOP = 640, 190, 20, 32, 52  # pixels


def bars() -> str:
    """The chart of the README: the time to receive a batch from a DataLoader worker, a bar for each container.

    The chart has a background of its own, so that it is legible on light and dark pages.
    """
    medians = peer("loader, 1 worker")["medians"]
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
        kind = "u" if who == "DeviceDict" else "o"
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
