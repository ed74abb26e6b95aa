"""`stack` and `cat`: many dicts in one."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from functools import partial
from typing import Any

import pytest
import simulated
import torch
from batches import Batch, batch
from checks import check_invariants, fails

from tensordict_lite import DeviceDict, DeviceMismatchError, Vocabulary, cat, collate, stack


class TestStackAndCat:
    def test_rows_come_together_again(self, device: torch.device) -> None:
        d = batch().to(device)
        again = stack(list(d.rows))
        check_invariants(again)
        assert type(again) is Batch and type(again["n"]) is Batch and again.device == device
        assert again.drop("o", "meta") == d.drop("o", "meta") and again["o"] == d["o"] and again["meta"] == [object] * 6
        both = cat([d.rows[:2], d.rows[2:]])
        assert both.drop("meta") == d.drop("meta") and both.decode("s") == d.decode("s")

    def test_dimensions_generators_and_plain_mappings(self) -> None:
        dicts = [{"x": [1.0, 2.0]}, {"x": [3.0, 4.0]}]
        assert stack(dicts, dim=1)["x"].tolist() == [[1.0, 3.0], [2.0, 4.0]]
        assert cat(dict(d) for d in dicts)["x"].tolist() == [1, 2, 3, 4]
        assert stack([OrderedDict(x=1, y=2), UserDict(y=4, x=3)])["x"].tolist() == [1, 3]

    @pytest.mark.parametrize("join", [stack, cat])
    @pytest.mark.parametrize(("dicts", "error", "message"), [
        ([], ValueError, "needs at least one dict"),
        ({"x": 1}, TypeError, "takes several dicts, in a list or another iterable"),
        ([{"x": [1]}, {"y": [1]}], ValueError, "dict 1 lacks 'x', which dict 0 has"),
        ([{"n": {"x": [1]}}, {"n": {"x": [1], "y": [1]}}], ValueError, "dict 1 has 'n.y', which dict 0 lacks"),
        ([{"n": {"x": [1]}}, {"n": [1]}], ValueError, "'n': dict 1 has int64[1], dict 0 has a mapping"),
        ([{"n": {"x": [[1, 2]]}}] * 2 + [{"n": {"x": [[1, 2, 3]]}}], ValueError,
         "'n.x': dict 2 has int64[1, 3], dict 0 has int64[1, 2]"),
        ([DeviceDict({"x": [1]}), DeviceDict({"x": [1]}, device="meta")], DeviceMismatchError,
         "dict 1 is on meta, others are on cpu; move it with .to('cpu')"),
        ([DeviceDict({"s": ["a"]}, encoders={"s": Vocabulary(["a"])}),
          DeviceDict({"s": ["b"]}, encoders={"s": Vocabulary(["b"])})], ValueError,
         "'s': expected strings of Vocabulary(['a']), got strings of Vocabulary(['b']) in dict 1; give"),
        ([DeviceDict({"s": ["a"]}), DeviceDict({"s": [[97]]})], ValueError,
         "'s': dict 1 has int64[1, 1], dict 0 has uint8[1, 1]"),
        ([DeviceDict({"s": [0.5]}), DeviceDict({"s": ["a"]}, encoders={"s": Vocabulary(["a"])})], ValueError,
         "'s': dict 1 has int64[1], dict 0 has float32[1]"),
    ])  # fmt: skip
    def test_dicts_that_disagree(self, join: Any, dicts: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error) as caught:
            join(dicts)
        assert message in str(caught.value)

    def test_a_dimension_that_is_not_there_is_named(self) -> None:
        fails(IndexError, r"^'n\.x': Dimension out of range", lambda: cat([DeviceDict({"n": {"x": [1]}})] * 2, dim=1))

    def test_the_dimension_is_that_of_the_strings(self) -> None:
        pair = [DeviceDict({"name": ["Ada", "Jo"]}), DeviceDict({"name": ["Bob", "Al"]})]
        assert stack(pair, dim=-1).decode("name") == stack(pair, dim=1).decode("name") == [["Ada", "Bob"], ["Jo", "Al"]]
        with pytest.raises(IndexError, match="'name': strings of 0 dimensions have no dim=0 to cat along"):
            cat([DeviceDict({"name": "Ada"}), DeviceDict({"name": "Jo"})])
        fails(IndexError, "'name': strings of 1 dimensions have no dim=1 to cat along", lambda: cat(pair, dim=1))

    def test_no_tensor_hides_in_a_list_of_objects(self) -> None:
        with pytest.raises(ValueError, match=r"'o': dict 1 has int64\[\], dict 0 has a NoneType"):
            stack([Batch({"o": None}), Batch({"o": torch.tensor(3)})])
        assert stack([Batch({"o": None}), Batch({"o": None}, device="meta")])["o"] == [None, None]

    def test_out_of_memory_stays_that(self) -> None:
        samples = [{"x": torch.zeros(1000, device="sim:0")} for _ in range(3)]
        for join in (stack, cat, collate, partial(collate, pack=False)):
            with simulated.memory_left(100), pytest.raises(torch.OutOfMemoryError):
                join(samples)

    def test_gradients_flow(self) -> None:
        w = torch.ones(2, requires_grad=True)
        stack([DeviceDict({"x": w}), DeviceDict({"x": w * 2})])["x"].sum().backward()
        assert w.grad is not None and w.grad.tolist() == [3, 3]
