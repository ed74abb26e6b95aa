"""What people see: the tree and the notebook table. Neither reads a value."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest
import torch

from tensordict_lite import DeviceDict, Vocabulary, collate


def test_the_tree() -> None:
    d = DeviceDict(
        {
            "image": torch.zeros(2, 3, dtype=torch.uint8),
            "species": ["a", "b"],
            "obs": {"q": 1.0, "deep": {"e": {}}},
            "id": object,
        },
        encoders={"species": Vocabulary(["a", "b"])},
        objects="keep",
    )
    assert repr(d) == (
        "DeviceDict(cpu, 4 fields, 26 B)\n"
        "├─ image    uint8[2, 3]\n"
        "├─ species  int64[2]     Vocabulary(['a', 'b'])\n"
        "├─ obs\n"
        "│  ├─ q     float32[]\n"
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


@pytest.mark.parametrize(
    ("count", "shown"),
    [(100, "400 B"), (1 << 10, "4.0 KiB"), (3 << 19, "6.0 MiB"), (1 << 29, "2.0 GiB"), (1 << 43, "32.0 TiB")],
)
def test_sizes(count: int, shown: str) -> None:
    assert repr(DeviceDict({"x": torch.empty(count, device="meta")})).splitlines()[0].endswith(f"1 field, {shown})")


def test_a_long_dict_is_folded() -> None:
    lines = repr(DeviceDict({f"k{i}": i for i in range(1000)})).splitlines()
    assert (
        len(lines) == 102
        and lines[51] == "┆  … 900 more"
        and lines[1].startswith("├─ k0 ")
        and lines[-1].startswith("└─ k999")
    )
    note = repr(DeviceDict({"s": "a"}, encoders={"s": Vocabulary(["a", "b" * 100])})).splitlines()[1]
    assert note.endswith("…") and len(note) < 90


@pytest.mark.filterwarnings("ignore:Sparse")
def test_special_tensors() -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert "float32[jagged]" in repr(DeviceDict({"n": jagged}))
    eye = torch.eye(4)
    sparse = [
        eye.to_sparse(),
        eye.to_sparse_csr(),
        eye.to_sparse_csc(),
        eye.to_sparse_bsr((2, 2)),
        eye.to_sparse_bsc((2, 2)),
    ]
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
    assert "<details open>" in page and "DeviceDict(cpu, 2 fields, 7 B)" in tags.text
    assert not re.search(r"color:\s*(#|rgb|black|white)", page), "colours are the page's own, light or dark"
    assert "<details><summary" in DeviceDict({f"k{i}": i for i in range(50)})._repr_html_(), "a long one is folded"


def test_no_value_is_read(copies: Any) -> None:
    d = DeviceDict({"x": torch.ones(3), "s": "text"}, device="sim")
    copies.clear()
    assert repr(d) and d._repr_html_() and d.nbytes
    assert not copies


def test_the_title_says_that_all_tensors_are_views() -> None:
    d = DeviceDict({"x": torch.zeros(3, 2), "n": {"y": torch.zeros(3)}})
    assert repr(d.rows[0]).startswith("DeviceDict(cpu, 2 fields, 12 B, views)\n")
    assert repr(d.rows[1:]).startswith("DeviceDict(cpu, 2 fields, 24 B, views)\n")
    for own in (
        d,
        d.rows[[0]],
        d.pack(),
        collate([{"x": 1.0}] * 2),
        DeviceDict({"o": None}, objects="keep"),
        DeviceDict(),
    ):
        assert "views" not in repr(own)
