"""`d.equal`, `rows.sort_by`, `rows.group_by` of several keys and `rows.tolist`."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
import torch
from checks import fails
from files import DTYPES
from hypothesis import given, settings
from hypothesis import strategies as st

from tensordict_lite import DeviceDict, DeviceMismatchError, Hashing, Utf8, Vocabulary

TEXTS = st.text("abé中", max_size=9)
ENCODERS: dict[str, Any] = {
    "Utf8": Utf8(),
    "Vocabulary": Vocabulary(["x", "cat", "a", "dog"]),
    "Hashing": Hashing(1 << 40),
    "callable": lambda strings: torch.tensor([[len(s), ord(s[0])] for s in strings]).reshape(-1, 2),  # pyright: ignore
}


def animals(device: torch.device | str = "cpu", **options: Any) -> DeviceDict[Any]:
    fields = {
        "name": ["dog", "cat", "dog", "a"],
        "age": [3, 1, 2, 2],
        "n": {"mass": [1.5, float("nan"), 0.5, 1.5], "box": [[1, 2], [3, 4], [1, 2], [5, 6]]},
    }
    return DeviceDict(fields, device=device, **options)


class TestEqual:
    @pytest.mark.parametrize("encoder", ENCODERS.values(), ids=ENCODERS)
    def test_strings(self, encoder: Any, device: torch.device) -> None:
        d = animals(device, encoders={"name": encoder})
        for value, found in (
            ("dog", [True, False, True, False]),
            (["a", "cat"], [False, True, False, True]),
            ([], [False] * 4),
            ("x", [False] * 4),
        ):
            mask = d.equal("name", value)
            assert (mask.tolist(), mask.dtype, mask.device) == (found, torch.bool, device)

    def test_strings_of_another_width(self) -> None:
        d = animals()
        assert not d.equal("name", "a longer name").any()
        assert d.equal("name", ["a longer name", "a"]).tolist() == [False, False, False, True]
        assert d.rows[d.equal("name", "a")]["age"].tolist() == [2]
        assert DeviceDict({"s": ["a"], "t": [["b", "c"]]}).equal("s", []).tolist() == [False]
        assert DeviceDict({"t": [["b", "c"]]}).equal("t", []).tolist() == [[False, False]]
        assert DeviceDict({"s": []}, encoders={"s": Utf8()}).equal("s", "a").tolist() == []

    def test_numbers(self, device: torch.device) -> None:
        d = animals(device)
        assert d.equal("age", 2).tolist() == [False, False, True, True]
        assert d.equal("age", range(2, 4)).tolist() == [True, False, True, True]
        assert d.equal("age", 2.5).tolist() == [False] * 4, "not cut to 2"
        assert d.equal(("n", "mass"), [0.5, float("nan")]).tolist() == [False, False, True, False]
        assert d.equal(("n", "box"), 2).tolist() == [[False, True], [False, False], [False, True], [False, False]]
        assert d.equal("age", torch.tensor([1], device=device)).tolist() == [False, True, False, False]
        assert DeviceDict({"f": [0.1, 0.2]}).equal("f", 0.1).tolist() == [True, False], "in the dtype of the field"
        with pytest.raises(DeviceMismatchError, match=rf"^'age' is on cpu, this DeviceDict is on {device}"):
            d.equal("age", torch.tensor([1]))

    @pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.uint16, torch.uint64, torch.bfloat16])
    def test_every_dtype(self, dtype: torch.dtype) -> None:
        d = DeviceDict({"x": torch.tensor([1, 0, 1]).to(dtype)})
        assert d.equal("x", 1).tolist() == [True, False, True] and d.equal("x", [0, 1]).all()

    @pytest.mark.parametrize(("key", "value", "error", "message"), [
        ("z", 1, KeyError, "'z'"),
        ("n", 1, TypeError, r"^'n': equal takes a dense tensor, got a mapping$"),
        ("age", "cat", ValueError, r"^'age': expected numbers, got strings; encode them first$"),
        ("age", None, TypeError, r"^'age': expected .*, got a NoneType"),
        ("age", [[1], [2]], TypeError, r"^'age': equal takes one value or a flat list of values, got a list$"),
        ("age", {"a": 1}, TypeError, r"^'age': equal takes one value or a flat list of values, got a mapping$"),
        ("name", [["cat"]], TypeError, r"^'name': equal takes one value or a flat list of values, got a list$"),
        ("word", "bat", ValueError, r"^'word': 'bat' is not among the 1 tokens of "),
        ("name", 3, TypeError, r"^'name': equal takes strings for Utf8\(\), got an int$"),
        ("name", [99, 97], TypeError, r"^'name': equal takes strings for Utf8\(\), got a list$"),
        ("name", torch.tensor([99, 97, 116]), TypeError, r"^'name': equal takes strings for Utf8\(\), got int64\[3\]$"),
    ])  # fmt: skip
    def test_what_is_refused(self, key: str, value: Any, error: type[Exception], message: str) -> None:
        d = animals(encoders={"word": Vocabulary(["cat"])}) | {"word": ["cat"] * 4}
        fails(error, message, lambda: d.equal(key, value))

    def test_integers_that_the_field_cannot_hold_are_in_no_row(self) -> None:
        whole = [one for name, one in DTYPES.items() if name.startswith(("int", "uint"))]
        assert len(whole) == 8
        numbers = [0, 1, 127, -1, 255, 2**16 - 1, -(2**15), 2**31, 2**32 + 1, -(2**63)]
        for ours, theirs in product(whole, repeat=2):
            rows, wanted = (
                [n for n in numbers if torch.iinfo(one).min <= n <= torch.iinfo(one).max] for one in (ours, theirs)
            )
            d = DeviceDict({"x": torch.tensor(rows, dtype=ours)})
            for n in wanted:
                for value in (torch.tensor(n, dtype=theirs), torch.tensor([n], dtype=theirs)):
                    assert d.equal("x", value).tolist() == [row == n for row in rows]

    def test_codes_of_another_shape(self) -> None:
        d = DeviceDict({"s": ["ab", "cd"]}, encoders={"s": lambda strings: torch.ones(len(strings), len(strings[0]))})
        fails(ValueError, r"^'s': equal takes a value for \w+\[2, 2\], got float32\[1\]$", lambda: d.equal("s", "a"))

    def test_a_nested_tensor(self) -> None:
        d = DeviceDict({"x": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)})
        fails(TypeError, r"^'x': equal takes a dense tensor, got .*$", lambda: d.equal("x", 1))

    @settings(max_examples=50, deadline=None)
    @given(st.lists(TEXTS, min_size=1, max_size=8), st.lists(TEXTS, max_size=3))
    def test_as_python_compares(self, texts: list[str], wanted: list[str]) -> None:
        d = DeviceDict({"s": texts})
        assert d.equal("s", wanted).tolist() == [text in wanted for text in texts]
        assert d.equal("s", texts[0]).tolist() == [text == texts[0] for text in texts]


class TestSort:
    def test_one_key(self, device: torch.device) -> None:
        assert animals(device).rows.sort_by("age", ("n", "mass"))["age"].tolist() == [1, 2, 2, 3]
        d = animals()
        assert d.rows.sort_by("name").decode("name") == ["a", "cat", "dog", "dog"]
        assert d.rows.sort_by("age")["n", "box"].tolist() == [[3, 4], [1, 2], [5, 6], [1, 2]], (
            "equal rows stay in order"
        )
        assert d.rows.sort_by("age", descending=True).decode("name") == ["dog", "dog", "a", "cat"]
        assert d.rows.sort_by(("n", "mass")).decode("name") == ["dog", "dog", "a", "cat"], "NaN is last"
        chosen = animals(encoders={"name": Vocabulary(["dog", "cat", "a"])})
        assert chosen.rows.sort_by("name").decode("name") == ["dog", "dog", "cat", "a"], "in the order of the tokens"
        assert len(d.rows[:0].rows.sort_by("name", "age").rows) == 0

    def test_codes_in_any_order_of_memory(self) -> None:
        d = DeviceDict({"s": ["sixteen letters!", "as many as there"]})
        d["s"] = d["s"].t().contiguous().t()
        assert d.rows.sort_by("s").decode("s") == list(d.rows.group_by("s")) == sorted(d.decode("s"))

    @settings(max_examples=50, deadline=None)
    @given(st.lists(st.tuples(TEXTS, st.integers(-2, 2), st.booleans()), min_size=1, max_size=12), st.booleans())
    def test_as_python_sorts(self, rows: list[tuple[str, int, bool]], descending: bool) -> None:
        texts, numbers, flags = zip(*rows, strict=True)
        d = DeviceDict({"s": texts, "n": {"i": numbers}, "b": flags, "at": range(len(rows))})
        for keys, picked in ((("s", ("n", "i")), (0, 1)), (("b", "s"), (2, 0)), ((("n", "i"),), (1,))):
            expected = sorted(range(len(rows)), key=lambda i: [rows[i][k] for k in picked], reverse=descending)
            if descending:  # Python keeps the order of equal rows, too
                expected = sorted(range(len(rows)), key=lambda i: [_reversed(rows[i][k]) for k in picked])
            assert d.rows.sort_by(*keys, descending=descending)["at"].tolist() == expected

    def test_what_is_refused(self) -> None:
        d = animals()
        for method in (d.rows.sort_by, d.rows.group_by):
            with pytest.raises(TypeError, match=rf"^{method.__name__} takes the key of one or more fields$"):
                method()
            with pytest.raises(ValueError, match=rf"^'n.box': {method.__name__} takes a field with one value"):
                method("age", ("n", "box"))
            with pytest.raises(TypeError, match=rf"^'n': {method.__name__} takes a dense tensor, got a mapping$"):
                method("n")
        with pytest.raises(TypeError, match=r"^'z': sort_by takes values that torch sorts, got complex64\[1\]"):
            DeviceDict({"z": [1j]}).rows.sort_by("z")
        with pytest.raises(TypeError, match=r"^'f': sort_by takes values that torch sorts, got float8_e5m2\[1\]"):
            DeviceDict({"f": torch.ones(1).to(torch.float8_e5m2)}).rows.sort_by("f")
        with pytest.raises(ValueError, match="rows need fields that agree on their first dimension"):
            DeviceDict({"x": [1, 2], "y": [1]}).rows.sort_by("x")


def _reversed(value: Any) -> Any:
    """A key that sorts in the other order."""
    return [-ord(c) for c in value] + [1] if isinstance(value, str) else -value


class TestGroupsOfSeveralKeys:
    def test_tuples_of_values(self) -> None:
        d = animals()
        groups = d.rows.group_by("name", "age")
        assert list(groups) == [("a", 2), ("cat", 1), ("dog", 2), ("dog", 3)]
        assert groups["dog", 2]["n", "mass"].tolist() == [0.5]
        assert d.rows[:0].rows.group_by("name", "age") == {}

    @settings(max_examples=50, deadline=None)
    @given(st.lists(st.tuples(st.integers(-1, 1), TEXTS, st.booleans()), min_size=1, max_size=12))
    def test_every_row_is_in_its_group(self, rows: list[tuple[int, str, bool]]) -> None:
        numbers, texts, flags = zip(*rows, strict=True)
        d = DeviceDict({"i": numbers, "s": texts, "b": flags, "at": range(len(rows))})
        groups = d.rows.group_by("i", "s", "b")
        assert list(groups) == sorted(set(rows))
        assert {key: part["at"].tolist() for key, part in groups.items()} == {
            key: [i for i, row in enumerate(rows) if row == key] for key in groups
        }


class TestTolist:
    def test_a_dict_for_each_row(self, device: torch.device) -> None:
        d = DeviceDict(
            {"s": ["a", "b"], "n": {"x": torch.tensor([[1, 2], [3, 4]]), "e": {}}, "k": [None, "k"], "all": {1}},
            objects="keep",
            device=device,
        )
        assert d.rows.tolist() == [
            {"s": "a", "n": {"x": [1, 2], "e": {}}, "k": None, "all": {1}},
            {"s": "b", "n": {"x": [3, 4], "e": {}}, "k": "k", "all": {1}},
        ]
        assert d.rows[:0].rows.tolist() == []
        assert DeviceDict(json.loads(json.dumps(animals().rows[:1].rows.tolist()))[0]).decode("name") == "dog"

    def test_the_shapes_must_agree(self) -> None:
        with pytest.raises(ValueError, match="rows need fields that agree on their first dimension"):
            DeviceDict({"x": [1, 2], "y": [1]}).rows.tolist()
