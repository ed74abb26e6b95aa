"""`Pad`: fill ragged fields up, in `collate` and in `cat`."""

from __future__ import annotations

import copy
import json
import pickle
import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from checks import check_invariants, fails
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from tensordict_lite import DeviceDict, Pad, TypedDeviceDict, Vocabulary, cat, collate

FULL = Pad(-1, side="left", multiple_of=4, lengths="n", mask="m")


class TestPad:
    def test_it_is_a_value(self) -> None:
        same = Pad(-1, "left", 4, "n", "m")
        assert same == FULL and hash(same) == hash(FULL) and Pad(-1) != FULL
        assert repr(FULL) == "Pad(-1, side='left', multiple_of=4, lengths='n', mask='m')"
        assert repr(Pad(0.5)) == "Pad(0.5)"
        for again in (
            pickle.loads(pickle.dumps(FULL)),
            copy.deepcopy(FULL),
            Pad.from_json(json.loads(json.dumps(FULL.to_json()))),
        ):
            assert again == FULL
        with pytest.raises(AttributeError):
            FULL.value = 3  # pyright: ignore[reportAttributeAccessIssue]

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"value": "0"}, TypeError, "Pad takes a real number as value, got '0'"),
            ({"value": 1j}, TypeError, "Pad takes a real number as value, got 1j"),  # torch pads with real numbers
            ({"side": "both"}, ValueError, "side is 'left' or 'right', got 'both'"),
            ({"multiple_of": 0}, ValueError, "multiple_of is a whole number of 1 or more, got 0"),
            ({"multiple_of": True}, ValueError, "multiple_of is a whole number of 1 or more, got True"),
            ({"lengths": 3}, TypeError, "lengths is the key of a new field, got 3"),
            ({"optional": 1}, TypeError, "optional is True or False, got 1"),
            ({"lengths": "n", "mask": "n"}, ValueError, "lengths and mask need different keys, got 'n' for both"),
        ],
    )  # fmt: skip
    def test_arguments(self, arguments: Any, error: type[Exception], message: str) -> None:
        fails(error, f"^{message}$", lambda: Pad(**arguments))


class TestCollate:
    @given(
        lengths=st.lists(st.integers(0, 7), min_size=1, max_size=4),
        rest=st.lists(st.integers(1, 2), max_size=2),
        side=st.sampled_from(["left", "right"]),
        multiple=st.integers(1, 5),
        pack=st.booleans(),
    )
    def test_against_a_loop(self, lengths: Any, rest: Any, side: Any, multiple: int, pack: bool) -> None:
        samples = [{"x": torch.rand(n, *rest)} for n in lengths]
        d = collate(samples, pad={"x": Pad(9.0, side=side, multiple_of=multiple, lengths="n", mask="m")}, pack=pack)
        check_invariants(d)
        length = -(-max(lengths) // multiple) * multiple
        assert list(d) == ["x", "n", "m"] and d["x"].shape == (len(samples), length, *rest)
        assert d["n"].dtype == torch.int64 and d["n"].tolist() == lengths and d["m"].dtype == torch.bool
        for row, mask, sample, n in zip(d["x"], d["m"], samples, lengths, strict=True):
            real = slice(0, n) if side == "right" else slice(length - n, length)
            assert torch.equal(row[real], sample["x"]) and mask[real].all() and int(mask.sum()) == n
            assert torch.equal(row[~mask], torch.full((length - n, *rest), 9.0))

    def test_packed_nested_and_by_path(self) -> None:
        samples = [{"n": {"box": [[1.0, 2.0]] * k, "id": k}, "box": [0.0] * k} for k in (2, 1)]
        d = collate(samples, pad={("n", "box"): Pad(0.0, lengths="k", mask="real"), "box": 5})
        check_invariants(d)
        assert d.is_packed and list(d["n"]) == ["box", "k", "real", "id"] and list(d) == ["n", "box"]
        assert d["n", "k"].tolist() == [2, 1] and d["n", "real"].tolist() == [[True, True], [True, False]]
        assert d["box"].tolist() == [[0.0, 0.0], [0.0, 5.0]]

    @pytest.mark.parametrize("value", [2**53 + 1, 2**63 - 1, -(2**63)])
    @pytest.mark.parametrize("pack", [True, False])
    @pytest.mark.parametrize("make", [
        torch.arange,
        lambda n: list(range(n)),
        lambda n: torch.arange(n).expand(1, n)[0],
        lambda n: torch.zeros(n, 60000).long(),
    ], ids=["tensors", "lists", "views", "large"])  # fmt: skip
    def test_large_numbers_stay_exact(self, value: int, pack: bool, make: Any) -> None:
        d = collate([{"x": make(n)} for n in (2, 3, 1)], pad={"x": Pad(value, multiple_of=4)}, pack=pack)
        assert d["x"].eq(value).view(3, 4, -1)[:, :, -1].tolist() == [[i >= n for i in range(4)] for n in (2, 3, 1)]

    @pytest.mark.parametrize(("dtype", "fits", "too_large"), [
        (torch.uint8, 255, 256),
        (torch.uint8, 0, -1),
        (torch.uint16, 65535, -1),
        (torch.uint64, 2**64 - 1, 2**64),
        (torch.int8, -128, -129),
        (torch.int64, 16777217.0, 0.5),
        (torch.bool, True, 2),
        (torch.float16, 65504, 1e10),
        (torch.float32, float("inf"), 1e39),
        (torch.bfloat16, float("nan"), 1e39),
        (torch.float64, 1 << 70, 1 << 2000),
        (torch.complex64, 0.5, 1e39),
    ])  # fmt: skip
    @pytest.mark.parametrize("pack", [True, False])
    def test_what_a_dtype_holds(self, dtype: torch.dtype, fits: float, too_large: float, pack: bool) -> None:
        samples = [{"x": torch.zeros(n, dtype=dtype)} for n in (1, 2)]
        padded = collate(samples, pad={"x": fits}, pack=pack)["x"]
        value = float(fits) if dtype.is_floating_point or dtype.is_complex else fits
        assert padded.dtype is dtype
        assert repr(padded[0, 1:].tolist()) == repr(torch.full((1,), value, dtype=dtype).tolist())
        for join in (
            lambda pad: collate(samples, pad=pad, pack=pack),
            lambda pad: cat([collate(samples[:1]), collate(samples[1:])], pad=pad),
        ):
            with pytest.raises(ValueError, match=rf"^'x': pad=\{{'x': .*\}} does not fit {dtype}$"):
                join({"x": too_large})

    @pytest.mark.parametrize(("options", "message"), [
        ({"pad": {"ids": 0, "id": 0}},
         "pad= names 'id', which no sample has; did you mean 'ids'? Or allow it with Pad(0, optional=True)"),
        ({"pad": {"ids": 0, ("k", "bos"): 0}},
         "pad= names ('k', 'bos'), which no sample has; did you mean 'k.box'? Or allow"),
        ({"pad": {"ids": 0, "other": 0}},
         "pad= names 'other', which no sample has; its keys are 'ids', 'k', 'box', 'n'. Or allow"),
        ({"ragged": ["ids", "boxes"]}, "ragged= names 'boxes', which no sample has; did you mean 'box'?"),
        ({"pad": {"ids": 0}, "encoders": {"id": Vocabulary(["a"])}},
         "encoders= names 'id', which no sample has; did you mean 'ids'?"),
    ])  # fmt: skip
    def test_keys_that_no_sample_has(self, options: Any, message: str) -> None:
        samples = [{"ids": [1] * n, "k": {"box": [0.5], "n": n}} for n in (1, 2)]
        with pytest.raises(ValueError, match="which no sample has") as caught:
            collate(samples, **options)
        assert str(caught.value).startswith(message)

    def test_keys_that_no_sample_needs(self) -> None:
        class Declares(TypedDeviceDict):
            ids: torch.Tensor
            label: torch.Tensor | None = None

        samples = [{"ids": [1] * n, "k": {"box": [0.5], "n": n}} for n in (1, 2)]
        plain = [{"ids": [1] * n} for n in (1, 2)]
        collate(samples, pad={"ids": 0, "box": 0, ("k", "n"): Pad(1, optional=True), "label": Pad(-1, optional=True)})
        collate(plain, cls=Declares, pad={"ids": 0, "label": 0}, encoders={"label": Vocabulary(["a"])})
        with pytest.raises(ValueError, match=r"^pad= names 'y', which no dict has; did you mean 'x'\? Or allow it"):
            cat([{"x": [[1]]}, {"x": [[1, 2]]}], pad={"x": 0, "y": 0})

    def test_samples_of_one_length_get_the_fields_too(self) -> None:
        d = collate([{"ids": torch.arange(3)}] * 2, pad={"ids": FULL})
        assert d["ids"].tolist() == [[-1, 0, 1, 2]] * 2 and d["n"].tolist() == [3, 3] and d["m"].sum() == 6
        assert collate([{"ids": torch.arange(3)}] * 2, pad={"ids": Pad(0)})["ids"].shape == (2, 3)

    def test_an_empty_list_has_the_dtype_of_the_others(self) -> None:
        d = collate([{"ids": [], "s": ["a"]}, {"ids": [1, 2], "s": []}], pad={"ids": Pad(7, lengths="n")}, ragged=["s"])
        assert d["ids"].tolist() == [[7, 7], [1, 2]] and d["n"].tolist() == [0, 2] and d["ids"].dtype == torch.int64
        assert d.decode("s") == [["a"], []]
        assert collate([{"ids": []}] * 2, pad={"ids": 0})["ids"].shape == (2, 0)

    def test_gradients_flow(self) -> None:
        w = torch.ones(2, requires_grad=True)
        collate([{"x": w}, {"x": w[:1] * 3}], pad={"x": Pad(0.0, side="left", multiple_of=4)})["x"].sum().backward()
        assert w.grad is not None and w.grad.tolist() == [4, 1]

    def test_a_typed_class_declares_the_fields(self) -> None:
        class Boxes(TypedDeviceDict):
            box: torch.Tensor
            n: torch.Tensor

        samples = [{"box": torch.ones(k, 4)} for k in (1, 2)]
        assert collate(samples, cls=Boxes, pad={"box": Pad(0.0, lengths="n")}).n.tolist() == [1, 2]
        with pytest.raises((TypeError, ValueError), match="'m'"):
            collate(samples, cls=Boxes, pad={"box": Pad(0.0, lengths="n", mask="m")})

    @pytest.mark.parametrize(("samples", "pad", "error", "message"), [
        ([{"x": [1]}, {"x": [1, 2]}], {"x": "0"}, TypeError,
         "pad= of collate maps keys to real numbers or Pad objects; got '0' for 'x'"),
        ([{"x": [1]}, {"x": [1, 2]}], {"x": 1j}, TypeError,
         "pad= of collate maps keys to real numbers or Pad objects; got 1j for 'x'"),
        ([{"x": [1], "n": 1}] * 2, {"x": FULL}, ValueError,
         "'x': pad= puts its lengths at 'n', which the samples have too; choose another key"),
        ([{"k": {"x": [1], "y": [1]}}] * 2, {"x": FULL, "y": FULL}, ValueError,
         "'k.y': pad= puts its lengths at 'n', which the samples have"),
        ([{"x": 1}, {"x": 2}], {"x": FULL}, ValueError,
         "'x': Pad(-1, side='left', multiple_of=4, lengths='n', mask='m') pads the first dimension, "
         "and the samples are single numbers"),
        ([{"x": [1]}, {"x": [1, 2]}], {"x": Pad(1.5)}, ValueError, "'x': pad={'x': 1.5} does not fit torch.int64"),
        ([{"x": [1]}, {"x": [1, 2]}], {"x": Pad(1.5, side="left")}, ValueError,
         "'x': pad={'x': Pad(1.5, side='left')} does not fit torch.int64"),
        ([{"x": torch.ones(1, 2)}, {"x": torch.ones(2, 3)}], {"x": FULL}, ValueError,
         "'x': sample 1 has float32[2, 3], sample 0 has float32[1, 2]; pad= fills up the first dimension only"),
        ([{"x": torch.ones(2)}, {"x": torch.ones(())}], {"x": FULL}, ValueError,
         "'x': sample 1 has float32[], sample 0 has float32[2]"),
        ([{"x": "a"}, {"x": "bc"}], {"x": FULL}, ValueError, "the encoder of these strings pads its codes itself"),
    ])  # fmt: skip
    def test_errors(self, samples: Any, pad: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error) as caught:
            collate(samples, pad=pad)
        assert message in str(caught.value)

    @pytest.mark.parametrize("options", [{"pad": {"x": 0}}, {"ragged": ["x"]}])
    @pytest.mark.parametrize(
        ("odd", "shown"), [(torch.ones(2, 3), "float32[2, 3]"), (torch.ones(1, 2).long(), "int64[1, 2]")]
    )
    def test_an_error_names_the_sample_that_cannot_be_joined(self, options: Any, odd: Any, shown: str) -> None:
        """It named the first sample of another length, which was fine."""
        samples = [{"x": torch.ones(1, 2)}, {"x": torch.ones(2, 2)}, {"x": odd}]
        with pytest.raises(ValueError, match=f"^'x': sample 2 has {re.escape(shown)}, sample 0 has float32"):
            collate(samples, **options)

    def test_from_a_worker(self) -> None:
        data: Any = [{"ids": list(range(n))} for n in (1, 3, 2, 5)]
        (one, two) = DataLoader(data, 2, num_workers=1, collate_fn=partial(collate, pad={"ids": FULL}))
        assert one["n"].tolist() == [1, 3] and two["ids"].shape == (2, 8) and two.is_packed


class TestCat:
    def test_batches_of_different_lengths(self) -> None:
        batches = [DeviceDict({"ids": torch.ones(2, k, dtype=torch.int64), "y": [0, 1]}) for k in (1, 3)]
        assert cat(batches, pad={"ids": 0})["ids"].tolist() == [[1, 0, 0]] * 2 + [[1, 1, 1]] * 2
        d = cat(batches, pad={"ids": FULL})
        check_invariants(d)
        assert d["ids"].tolist() == [[-1, -1, -1, 1]] * 2 + [[-1, 1, 1, 1]] * 2 and d["y"].tolist() == [0, 1, 0, 1]
        assert d["n"].tolist() == [1, 1, 3, 3] and torch.equal(d["m"], d["ids"] == 1)
        assert [list(b) for b in batches] == [["ids", "y"]] * 2, "the dicts are unchanged"

    def test_the_fill_value_fits_each_dict(self) -> None:
        batches = [{"x": torch.ones(1, 2).long()}, {"x": torch.ones(1, 1, dtype=torch.uint8)}]
        fails(ValueError, r"'x': pad=\{'x': 300\} does not fit torch.uint8", lambda: cat(batches, pad={"x": 300}))
        assert cat(batches[:1] * 2, pad={"x": Pad(2**53 + 1, multiple_of=3)})["x"][:, 2].tolist() == [2**53 + 1] * 2

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_it_continues_what_collate_began(self, side: Any) -> None:
        pad = {"x": Pad(0.0, side=side, multiple_of=2, lengths="n", mask="m")}
        samples = [{"k": {"x": torch.rand(n)}} for n in (1, 5, 2, 3)]
        assert cat([collate(samples[:2], pad=pad), collate(samples[2:], pad=pad)], pad=pad) == collate(samples, pad=pad)

    @pytest.mark.parametrize(("arguments", "error", "message"), [
        ({"pad": {"x": 0}, "dim": 1}, ValueError, "pad= fills up the second dimension for cat along dim=0, got dim=1"),
        ({"pad": 3}, TypeError, "cat takes a mapping from keys to fill values as pad="),
        ({"pad": {"x": None}}, TypeError, "pad= of cat maps keys to real numbers or Pad objects; got None for 'x'"),
    ])  # fmt: skip
    def test_wrong_arguments(self, arguments: Any, error: type[Exception], message: str) -> None:
        fails(error, message, lambda: cat([{"x": torch.ones(2, 1)}, {"x": torch.ones(2, 2)}], **arguments))

    def test_errors(self) -> None:
        with pytest.raises(
            ValueError, match=r"'x': pad= of cat takes two dimensions or more, got float32\[2\] in dict 0"
        ):
            cat([{"x": torch.ones(2)}] * 2, pad={"x": 0})
        with pytest.raises(ValueError, match=r"'x': pad=\{'x': 1.5\} does not fit torch.int64"):
            cat([{"x": [[1]]}, {"x": [[1, 2]]}], pad={"x": 1.5})
        with pytest.raises(ValueError, match="dict 1 lacks 'x', which dict 0 has"):
            cat([{"x": [[1]]}, {"y": [[1, 2]]}], pad={"x": 1})

    @pytest.mark.parametrize(("others", "shown"), [
        ({"n": torch.zeros(2)}, r"lengths at 'n', where dict 1 has float32\[2\]"),
        ({"n": {"x": torch.zeros(2)}}, "lengths at 'n', where dict 1 has a mapping"),
        ({"m": torch.zeros(2, 3)}, r"mask at 'm', where dict 1 has float32\[2, 3\]"),
        ({"m": torch.ones(2, 2, dtype=torch.bool)}, r"mask at 'm', where dict 1 has bool\[2, 2\]"),
    ])  # fmt: skip
    def test_a_field_of_another_meaning_is_not_taken_for_the_lengths_or_the_mask(self, others: Any, shown: str) -> None:
        batches = [DeviceDict({"ids": torch.zeros(2, 2)}), DeviceDict({"ids": torch.zeros(2, 3), **others})]
        with pytest.raises(ValueError, match=rf"^'ids': pad= puts its {shown}; choose another key$"):
            cat(batches, pad={"ids": Pad(0, lengths="n", mask="m")})


@pytest.mark.parametrize(("lists", "dtype"), [
    ([[1, 2], [1.5]], torch.float32),
    ([[2.5], [], (1, 2)], torch.float32),
    ([[True], [2, 3]], torch.int64),
    ([[1], [1j, 2.5]], torch.complex64),
    ([[[1, 2]], [[1.5, 2], [3, 4]], []], torch.float32),
])  # fmt: skip
@pytest.mark.parametrize("wide", [None, torch.float64])
def test_lists_of_numbers_of_different_types(lists: list[Any], dtype: torch.dtype, wide: torch.dtype | None) -> None:
    """They get the dtype that one list of all numbers has."""

    class Batch(DeviceDict[Any], dtype=wide):
        pass

    expected: Any = Batch({"x": [item for items in lists for item in items]})["x"]
    assert expected.dtype == (dtype if wide is None or not dtype.is_floating_point else wide)
    samples = [{"x": items} for items in lists]
    joined: Any = collate(samples, cls=Batch, ragged=["x"])["x"]
    assert joined.values.dtype == expected.dtype and torch.equal(joined.values, expected)
    padded = collate(samples, cls=Batch, pad={"x": Pad(0, mask="m")})
    assert padded["x"].dtype == expected.dtype and torch.equal(padded["x"][padded["m"]], expected)
    with pytest.raises(ValueError, match=r"^'x': sample 1 has int64\[1\], sample 0 has float32\[1\]"):
        collate([{"x": torch.ones(1)}, {"x": [1]}], ragged=["x"])


class TestSeveralDimensions:
    """Images that differ in height and width."""

    IMAGES = (torch.ones(3, 4, 8), torch.ones(3, 6, 5), torch.ones(3, 2, 2))

    def samples(self) -> list[dict[str, Any]]:
        return [{"image": image, "y": i} for i, image in enumerate(self.IMAGES)]

    @pytest.mark.parametrize("side", ["right", "left"])
    def test_images(self, side: Any) -> None:
        pad = Pad(-1, side, multiple_of=4, lengths="size", mask="real", dims=(-2, -1))
        batch = collate(self.samples(), pad={"image": pad})
        assert batch.is_packed and batch["image"].shape == (3, 3, 8, 8) and batch["real"].shape == (3, 8, 8)
        assert batch["size"].tolist() == [[4, 8], [6, 5], [2, 2]]
        for image, padded, real, size in zip(
            self.IMAGES, batch["image"], batch["real"], batch["size"].tolist(), strict=True
        ):
            height, width = size
            inside = padded[:, :height, :width] if side == "right" else padded[:, 8 - height :, 8 - width :]
            assert torch.equal(inside, image) and int(real.sum()) == height * width
            assert torch.equal(padded[:, real], image.flatten(1)) and bool((padded[:, ~real] == -1).all())

    def test_one_other_dimension(self) -> None:
        """The lengths and the mask are those of one dimension, whichever it is."""
        pad = Pad(0, lengths="n", mask="real", dims=(1,))
        batch = collate([{"x": torch.ones(2, 1)}, {"x": torch.ones(2, 3)}], pad={"x": pad})
        assert batch["x"].tolist() == [[[1, 0, 0]] * 2, [[1] * 3] * 2]
        assert batch["n"].tolist() == [1, 3] and batch["real"].tolist() == [[True, False, False], [True] * 3]

    @pytest.mark.parametrize("given", [torch.ones, np.ones], ids=["tensors", "arrays"])
    def test_the_first_dimensions(self, given: Any) -> None:
        batch = collate([{"x": given((2, 3, 1))}, {"x": given((1, 4, 1))}], pad={"x": Pad(0, dims=2)})
        assert batch["x"].shape == (2, 2, 4, 1) and float(batch["x"].sum()) == 10
        lists = collate([{"i": [[1, 2], [3, 4]]}, {"i": [[1, 2, 3]]}], pad={"i": Pad(0, dims=2)})
        assert lists["i"].tolist() == [[[1, 2, 0], [3, 4, 0]], [[1, 2, 3], [0, 0, 0]]]

    def test_gradients_flow(self) -> None:
        images = [image.clone().requires_grad_() for image in self.IMAGES]
        collate([{"x": image} for image in images], pad={"x": Pad(0, dims=(1, 2))})["x"].sum().backward()
        assert all(image.grad is not None and torch.equal(image.grad, torch.ones_like(image)) for image in images)

    @pytest.mark.parametrize(("pad", "message"), [
        (Pad(0, dims=(1, 5)), r"'image': Pad(0, dims=(1, 5)) pads dimensions that samples of 3 dimensions lack"),
        (Pad(0, dims=2),
         "'image': sample 1 has float32[3, 6, 5], sample 0 has float32[3, 4, 8]; "
         "Pad(0, dims=2) lets dense samples differ in the dimensions [0, 1] only"),
    ], ids=["no such dimension", "another dimension"])  # fmt: skip
    def test_samples_that_do_not_fit(self, pad: Pad, message: str) -> None:
        fails(ValueError, re.escape(message), lambda: collate(self.samples(), pad={"image": pad}))

    @pytest.mark.parametrize("dims", [1, 2])
    @pytest.mark.parametrize("view", [torch.Tensor.conj, lambda x: x.conj().imag], ids=["conjugate", "negative"])
    def test_views_are_padded_by_their_values(self, view: Any, dims: int) -> None:
        samples = [torch.ones(n, 2 if dims == 1 else n, dtype=torch.complex64) * 1j for n in (1, 2)]
        batch = collate([{"x": view(x)} for x in samples], pad={"x": Pad(0, dims=dims)})
        assert batch.is_packed and batch["x"][1].tolist() == view(samples[1]).tolist()
        assert batch["x"][0, 0, 0] == view(samples[0])[0, 0] and not batch["x"][0, 1].any()

    def test_a_sample_that_is_not_dense(self) -> None:
        for first in (torch.eye(2), torch.eye(2).to_sparse()):
            with pytest.raises(
                ValueError, match=r"^'x': Pad\(0, dims=2\) pads dense samples, sample \d has sparse_coo"
            ):
                collate([{"x": first}, {"x": torch.eye(2).to_sparse()}], pad={"x": Pad(0, dims=2)})

    def test_cat_refuses_them(self) -> None:
        d = DeviceDict({"x": torch.ones(1, 2, 2)})
        fails(ValueError, "cat takes a Pad for the second", lambda: cat([d, d], pad={"x": Pad(0, dims=2)}))

    @pytest.mark.parametrize(
        ("dims", "error"), [(0, ValueError), ((), TypeError), ("x", TypeError), (1.5, TypeError), (True, TypeError)]
    )
    def test_invalid_dims(self, dims: Any, error: type[Exception]) -> None:
        fails(error, r"^dims is ", lambda: Pad(0, dims=dims))

    def test_json(self) -> None:
        pad = Pad(0, dims=(1, 2))
        assert Pad.from_json(json.loads(json.dumps(pad.to_json()))) == pad == pickle.loads(pickle.dumps(pad))
        assert repr(pad) == "Pad(0, dims=(1, 2))"


def test_cat_pads_a_nested_field_by_its_path() -> None:
    dicts = [DeviceDict({"ids": [[1]], "n": {"ids": [list(range(width))]}}) for width in (1, 2)]
    batch = cat(dicts, pad={("n", "ids"): Pad(9, lengths="sizes")})
    assert batch.tolist() == {"ids": [[1], [1]], "n": {"ids": [[0, 9], [0, 1]], "sizes": [1, 2]}}
    wide = DeviceDict({"ids": [[1, 2]], "n": {"ids": [[0]]}})
    with pytest.raises(ValueError, match=r"^'ids': dict 1 has int64\[1, 2\], dict 0 has int64\[1, 1\]"):
        cat([dicts[0], wide], pad={("n", "ids"): 0})
