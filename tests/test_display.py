"""What people see: the tree and the notebook table. They read no tensor with dimensions, and nothing on a device."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unicodedata import combining, east_asian_width

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensordict_lite import DeviceDict, Vocabulary, collate, load
from tensordict_lite.tables import RowWriter


def test_the_tree() -> None:
    d = DeviceDict({
        "image": torch.zeros(2, 3, dtype=torch.uint8),
        "species": ["a", "b"],
        "obs": {"q": torch.tensor(1.0), "deep": {"e": {}}},
        "id": object,
    }, encoders={"species": Vocabulary(["a", "b"])}, objects="keep")  # fmt: skip
    assert repr(d) == (
        "DeviceDict(cpu, 4 fields, 26 B)\n"
        "├─ image    uint8[2, 3]\n"
        "├─ species  int64[2]     Vocabulary(['a', 'b'])\n"
        "├─ obs\n"
        "│  ├─ q     float32[]    1\n"
        "│  └─ deep\n"
        "│     └─ e  (empty)\n"
        "└─ id       object type"
    )
    assert str(d) == repr(d)


def test_small_ones() -> None:
    class Batch(DeviceDict):
        pass

    assert repr(DeviceDict()) == "DeviceDict(no device yet, 0 fields, 0 B)"
    assert repr(Batch({"x": 1}).to("meta")) == "Batch(meta, 1 field, 8 B)\n└─ x  int64[]"
    deep = DeviceDict({"a": {"b": {"c": {"d": {"e": {"f": 1}}}}}})
    assert [line[0] for line in repr(deep).splitlines()[1:]] == ["└", " ", " ", " ", " ", "…"]


@pytest.mark.parametrize(
    ("count", "shown"),
    [(100, "400 B"), (1 << 10, "4.0 KiB"), (3 << 19, "6.0 MiB"), (1 << 29, "2.0 GiB"), (1 << 43, "32.0 TiB")],
)
def test_sizes(count: int, shown: str) -> None:
    assert repr(DeviceDict({"x": torch.empty(count, device="meta")})).splitlines()[0].endswith(f"1 field, {shown})")


def test_a_long_dict_is_folded() -> None:
    lines = repr(DeviceDict({f"k{i}": i for i in range(1000)})).splitlines()
    assert len(lines) == 100 and lines[50] == "┆  … 902 more" and lines[1].startswith("├─ k0 ")
    assert lines[-1].startswith("└─ k999")
    note = repr(DeviceDict({"s": "a"}, encoders={"s": Vocabulary(["a", "b" * 100])})).splitlines()[1]
    assert "…" in note and len(note) <= 80


@pytest.mark.filterwarnings("ignore:Sparse")
def test_special_tensors() -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert "float32[jagged]" in repr(DeviceDict({"n": jagged}))
    eye = torch.eye(4)
    sparse = [
        eye.to_sparse(), eye.to_sparse_csr(), eye.to_sparse_csc(), eye.to_sparse_bsr((2, 2)), eye.to_sparse_bsc((2, 2)),
    ]  # fmt: skip
    assert [DeviceDict({"s": s}).nbytes for s in sparse] == [80, 88, 88, 72, 72]
    assert all("float32[4, 4]" in repr(DeviceDict({"s": s})) for s in sparse)


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_table() -> None:
    d = DeviceDict({"<b>": 1.0, "obs": {"name": ["ada"]}})
    page = d._repr_html_()
    assert "color:inherit" in page, "it reads on a dark page without a doctype, too"
    tags = _Tags()
    tags.feed(page)
    assert not tags.open, "every tag is closed"
    assert "<b>" in tags.text and "&lt;b&gt;" in page and "uint8[1, 3]" in tags.text and "Utf8()" in tags.text
    assert "<details open " in page and "DeviceDict(cpu, 2 fields, 7 B)" in tags.text
    assert not re.search(r"color:\s*(#|rgb|black|white)", page), "colours are the page's own, light or dark"
    assert "<details style" in DeviceDict({f"k{i}": i for i in range(50)})._repr_html_(), "a long one is folded"


def test_no_value_is_read(copies: Any) -> None:
    d = DeviceDict({"x": torch.ones(3), "s": "text"}, device="sim")
    copies.clear()
    assert repr(d) and d._repr_html_() and d.nbytes
    assert not copies


def test_the_title_says_that_all_tensors_are_views() -> None:
    d = DeviceDict({"x": torch.zeros(3, 2), "n": {"y": torch.zeros(3)}})
    assert repr(d.rows[0]).startswith("DeviceDict(cpu, 2 fields, 12 B, views)\n")
    assert repr(d.rows[1:]).startswith("DeviceDict(cpu, 2 rows, 2 fields, 24 B, views)\n")
    for own in (
        d, d.rows[[0]], d.pack(), collate([{"x": 1.0}] * 2), DeviceDict({"o": None}, objects="keep"), DeviceDict(),
    ):  # fmt: skip
        assert "views" not in repr(own)


HOSTILE = ["<b>&amp;\"'", "a\nb", "\x1b[31mred", "\u202egnp.exe", "\u200fx", "", " pad ", "tab\t", "\ud800", "z\x00"]


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_hostile_names_stay_on_their_line(text: str) -> None:
    d = type(text.replace("\0", "") if "\ud800" not in text else "x", (DeviceDict,), {})({text: {text: 1.0}})
    shown = repr(d)
    assert len(shown.splitlines()) == 3 and all(map(str.isprintable, shown.splitlines()))
    page = d._repr_html_()
    tags = _Tags()
    tags.feed(page)
    assert not tags.open and page.isprintable()
    assert set(re.findall(r"<(\w+)", page)) <= {"details", "summary", "div", "table", "tr", "th", "td"}


@settings(deadline=None, max_examples=60)
@given(
    st.recursive(
        st.integers(0, 9), lambda inner: st.dictionaries(st.text(max_size=120), inner, max_size=4), max_leaves=12
    )
)
def test_no_text_breaks_the_tree(value: Any) -> None:
    d = DeviceDict({"x": value})
    lines = repr(d).splitlines()
    assert len(lines) <= 100 and all(line.isprintable() and columns(line) <= 80 for line in lines)
    tags = _Tags()
    tags.feed(d._repr_html_())
    assert not tags.open


def columns(line: str) -> int:
    """The columns that a terminal takes."""
    return sum(0 if combining(char) else 1 + (east_asian_width(char) in "WF") for char in line)


def test_wide_things_fit_in_80_columns() -> None:
    cls = type("A" * 200, (DeviceDict,), {})
    deep: Any = torch.zeros(2)
    for _ in range(62):
        deep = {"level": deep}
    d = cls({
        "k" * 200: torch.zeros([1] * 40), "\u754c" * 60: ["a"], "deep": deep, "kept": type("B" * 300, (), {})(),
        "s": ["x" * 500],
    }, encoders={"s": Vocabulary(["x" * 500])}, objects="keep")  # fmt: skip
    lines = repr(d).splitlines()
    assert all(columns(line) <= 80 for line in lines)
    assert lines[0].startswith("AAAAAAAAAAAAAAAAAA…AAA") and lines[0].endswith("A(cpu, 5 fields, 20 B)")
    assert lines[1].startswith("├─ kkkk") and "…" in lines[1] and "float32[1, 1" in lines[1]
    assert sum("level" in line for line in lines) == 62, "a deep key keeps its name"


def test_numbers_on_the_cpu_show_their_values() -> None:
    numbers: dict[str, Any] = {
        "loss": torch.tensor(0.53124),
        "big": torch.tensor(2**63 - 1),
        "most": torch.tensor(2**64 - 1, dtype=torch.uint64),
        "half": torch.tensor(1.5, dtype=torch.bfloat16),
        "eight": torch.tensor(1.5).to(torch.float8_e4m3fn),
        "z": torch.tensor(1 + 2j),
        "on": torch.tensor(True),
        "nan": torch.tensor(float("nan")),
        "code": "b",
        "p": torch.nn.Parameter(torch.tensor(2.0)),
        "list": torch.zeros(1),
    }
    d = DeviceDict(numbers, encoders={"code": Vocabulary(["a", "b"])})
    shown = {line.split()[1]: line.split("]", 1)[1].strip() for line in repr(d).splitlines()[1:]}
    assert shown == {
        "loss": "0.5312", "big": "9223372036854775807", "most": "18446744073709551615", "half": "1.5", "eight": "1.5",
        "z": "1+2j", "on": "True", "nan": "nan", "code": "1  Vocabulary(['a', 'b'])", "p": "2", "list": "",
    }  # fmt: skip
    assert "9223372036854775807" in d._repr_html_()
    seen: list[str] = []
    torch.vmap(lambda x: seen.append(repr(DeviceDict({"x": x}))) or x)(torch.zeros(3))  # type: ignore[func-returns-value]
    assert seen[0].splitlines()[1] == "└─ x  float32[]"


def test_the_title_counts_the_rows() -> None:
    assert "(cpu, 3 rows, " in repr(DeviceDict({"x": torch.zeros(3, 2), "n": {"name": ["a", "b", "c"]}}))
    assert "(cpu, 1 row, " in repr(DeviceDict({"x": torch.zeros(1)}))
    for other in ({"x": torch.zeros(3), "y": torch.zeros(2)}, {"x": torch.zeros(3), "s": "one"}, {"x": 1}, {"s": "a"}):
        assert " row" not in repr(DeviceDict(other))


def test_the_title_names_the_folder_of_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("long" * 30) / "table"
    folder.parent.mkdir()
    with RowWriter(folder, like={"x": [0.0], "n": {"y": [0]}}) as writer:
        writer.write({"x": torch.zeros(300_000), "n": {"y": torch.zeros(300_000, dtype=torch.int64)}})
    table = load(folder)
    title = repr(table).splitlines()[0]
    assert len(title) <= 80 and ", mapped from /" in title and title.endswith("/table)") and "…" in title
    assert "mapped from" in repr(table.rows[:2]) and "mapped from" not in repr(table.rows[[1]])
    monkeypatch.chdir(folder.parent)
    assert repr(table).splitlines()[0].endswith("B, mapped from table)")
    shutil.copytree(folder, "other")
    assert "mapped from" not in repr(DeviceDict({"x": table["x"], "y": load("other")["x"]}))
    table["z"] = torch.zeros(300_000)
    assert "mapped from" not in repr(table)


def test_10_000_fields_are_shown_in_100_lines() -> None:
    d = DeviceDict({f"<k{i}>": torch.zeros(1) for i in range(10_000)})
    assert len(repr(d).splitlines()) == 100 and "… 9902 more" in repr(d)
    page = d._repr_html_()
    assert page.count("<tr>") == 100 and "… 9902 more" in page and "<k" not in page
