"""What a mistake is answered with: what is wrong, where, and what to do. Under public names."""

from __future__ import annotations

import ast
import copy
import inspect
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checks import check_invariants, fails
from torch import Tensor
from torch.utils.data import DataLoader

import tensordict_lite
from tensordict_lite import (
    DeviceDict,
    MissingKeyError,
    StringEncoder,
    TypedDeviceDict,
    Utf8,
    cat,
    collate,
    load,
    prefetch,
    register_encoder,
    save,
    stack,
    to_device,
)

OPTIONS = "device, encoders, on_mismatch, objects, dtype"


def refused(error: type[Exception], message: str, call: Callable[[], Any]) -> Exception:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message
    return caught.value


class Batch(TypedDeviceDict):
    image: Tensor
    shape: Tensor | None = None


class TestOptions:
    def test_keywords_are_options(self) -> None:
        make: Any = DeviceDict
        refused(
            TypeError,
            f"DeviceDict() has no option 'x'; its options are {OPTIONS}; a field goes into a mapping: "
            'DeviceDict({"x": ...})',
            lambda: make(x=torch.ones(1)),
        )

    @pytest.mark.parametrize(
        ("name", "option"), [("devise", "device"), ("encoder", "encoders"), ("on_mismach", "on_mismatch")]
    )
    def test_a_misspelled_option(self, name: str, option: str) -> None:
        make: Any = DeviceDict
        with pytest.raises(TypeError, match=rf"^DeviceDict\(\) has no option '{name}', did you mean '{option}'\?"):
            make({"x": 1}, **{name: "cpu"})

    @pytest.mark.parametrize(("cls", "given", "shown"), [
        (DeviceDict, ("cpu",), "'cpu'"),
        (DeviceDict, (torch.device("cuda", 1), True), "..."),
        (DeviceDict, (0,), "0"),
        (DeviceDict, ({},), "..."),
        (Batch, ("cpu",), "'cpu'"),
    ], ids=["a name", "two arguments", "a number", "a dict", "a typed class"])  # fmt: skip
    def test_options_are_given_by_name(self, cls: Any, given: tuple[Any, ...], shown: str) -> None:
        text = f"takes one positional argument, the data; name the options: device={shown}"
        refused(TypeError, f"{cls.__name__}() {text}", lambda: cls({"image": 1}, *given))

    def test_options_of_from_dict_are_given_by_name(self) -> None:
        make: Any = Batch.from_dict
        fails(TypeError, "positional argument", lambda: make({"image": 1}, "cpu"))

    def test_a_subclass_is_named_by_its_own_name(self) -> None:
        class Named(DeviceDict):
            pass

        make: Any = Named
        fails(TypeError, r"^Named\(\) has no option 'x'; .*Named\(\{\"x\": \.\.\.\}\)$", lambda: make(x=1))

    def test_of_a_class(self) -> None:
        def declare(**options: Any) -> None:
            class Named(DeviceDict, **options):
                pass

        refused(
            TypeError,
            "class Named has no option 'on_mismach', did you mean 'on_mismatch'? its options are "
            "encoders, on_mismatch, objects, dtype",
            lambda: declare(on_mismach="move"),
        )

    def test_of_a_mixin_are_its_own(self) -> None:
        class Mixin:
            def __init_subclass__(cls, tag: str = "", **options: Any) -> None:
                super().__init_subclass__(**options)
                cls.tag = tag  # pyright: ignore[reportAttributeAccessIssue]

        class Named(DeviceDict, Mixin, tag="t", on_mismatch="move"):  # pyright: ignore[reportCallIssue, reportGeneralTypeIssues]
            pass

        assert Named.tag == "t"  # pyright: ignore[reportAttributeAccessIssue]

    @pytest.mark.parametrize(("name", "text"), [("devise", "the option 'device'"), ("imge", "'image'")])
    def test_of_a_typed_class(self, name: str, text: str) -> None:
        make: Any = Batch
        with pytest.raises(TypeError, match=rf"^Batch has no field '{name}', did you mean {text}\? Its fields are"):
            make(image=torch.ones(1), **{name: "cpu"})


def adam() -> torch.optim.Optimizer:
    layer = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


class TestOptimizers:
    def test_their_state_stays_a_plain_dict(self, tmp_path: Path) -> None:
        optimizer = adam()
        torch.save(optimizer.state_dict(), tmp_path / "opt")
        again = to_device(torch.load(tmp_path / "opt"), "cpu")
        optimizer.load_state_dict(again)
        assert optimizer.state_dict()["state"][0]["exp_avg"].shape == (1, 2)

    def test_other_ints_are_keys_to_rename(self) -> None:
        refused(TypeError, "keys are str, got 0 of type int; use '0'", lambda: DeviceDict({0: 1}))  # pyright: ignore
        refused(TypeError, "keys are str, got 0 of type int in 'state'; use '0'", lambda: DeviceDict({"state": {0: 1}}))


def nested() -> DeviceDict[Any]:
    return DeviceDict({"image": torch.ones(2), "label": [1, 2], "n": {"z": 1, "deep": {"w": 2}}, "e": {}})


MISSING = {
    "close": ("imgae", "'imgae' is not in this DeviceDict; did you mean 'image'?"),
    "none close": ("qq", "'qq' is not in this DeviceDict; its keys are 'image', 'label', 'n', 'e'"),
    "dotted": ("n.z", "'n.z' is not in this DeviceDict; use the path d['n', 'z']"),
    "dotted twice": ("n.deep.w", "'n.deep.w' is not in this DeviceDict; use the path d['n', 'deep', 'w']"),
    "nested": ("z", "'z' is not in this DeviceDict; use the path d['n', 'z']"),
    "path": (("n", "zz"), "'n.zz' is not in this DeviceDict: 'n' has no 'zz'; did you mean 'z'?"),
    "middle": (("m", "z"), "'m.z' is not in this DeviceDict: it has no 'm'; its keys are 'image', 'label', 'n', 'e'"),
    "dotted part": (
        ("n", "deep.w"),
        "'n.deep.w' is not in this DeviceDict: 'n' has no 'deep.w'; use the path d['n', 'deep', 'w']",
    ),
    "through a tensor": (
        ("image", "x", "y"),
        "'image.x.y' is not in this DeviceDict: 'image' is a tensor, not a nested dict; it is d['image']",
    ),
    "empty": (("e", "x"), "'e.x' is not in this DeviceDict: 'e' has no 'x'; 'e' is empty"),
    "no key": ((), "a path needs at least one key, got ()"),
}


@pytest.mark.parametrize(("key", "message"), MISSING.values(), ids=MISSING)
class TestMissingKeys:
    def test_everywhere(self, key: Any, message: str) -> None:
        d = nested()
        for use in (d.__getitem__, d.__delitem__, d.pop, d.decode, d.select, d.drop):
            error = refused(MissingKeyError, message, lambda use=use: use(key))
            assert error.args == (key,) and isinstance(error, KeyError)
        check_invariants(d)
        assert d == nested()

    def test_in_a_file(self, key: Any, message: str, tmp_path: Path) -> None:
        if key == ():
            pytest.skip("no key of a file")
        nested().save(tmp_path / "d")
        expected = message.replace("this DeviceDict", str(tmp_path / "d"))
        assert refused(MissingKeyError, expected, lambda: load(tmp_path / "d", keys=[key])).args == (key,)

    def test_it_travels(self, key: Any, message: str) -> None:
        with pytest.raises(MissingKeyError) as caught:
            nested()[key]
        for again in (pickle.loads(pickle.dumps(caught.value)), copy.copy(caught.value), copy.deepcopy(caught.value)):
            assert type(again) is MissingKeyError and again.args == (key,) and str(again) == message

    def test_no_message_where_none_is_asked_for(self, key: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tensordict_lite._dict.device_dict.missing_key", None)
        d = nested()
        assert d.get(key) is None and d.get(key, 1) == 1 and key not in d and d.pop(key, 2) == 2
        if key and key != ("image", "x", "y"):
            assert d.setdefault(key, 3) is d[key]


class _Lookup:
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return {"x": nested()["imgae"]}


def test_a_missing_key_in_a_worker() -> None:
    with pytest.raises(MissingKeyError, match=r"(?s)Caught MissingKeyError in DataLoader.*\n.*did you mean 'image'\?"):
        list(DataLoader(_Lookup(), num_workers=1))  # pyright: ignore[reportArgumentType]


def test_many_keys_are_cut_and_none_are_said() -> None:
    d = DeviceDict({f"k{i}": i for i in range(12)})
    listed = ", ".join(repr(f"k{i}") for i in range(10))
    refused(KeyError, f"'zzz' is not in this DeviceDict; its keys are {listed} and 2 more", lambda: d["zzz"])
    refused(KeyError, "'x' is not in this DeviceDict; it is empty", lambda: DeviceDict()["x"])
    refused(KeyError, "'imge' is not in this Batch; did you mean 'image'?", lambda: Batch(image=torch.ones(1))["imge"])


def test_a_kept_object_is_no_dict() -> None:
    d = DeviceDict({"o": {1}}, objects="keep")
    message = "'o.x' is not in this DeviceDict: 'o' is a set, not a nested dict; it is d['o']"
    refused(KeyError, message, lambda: d["o", "x"])


class TestIndices:
    ROWS: tuple[tuple[Any, str], ...] = (
        (0, "keys are str, got 0 of type int; rows are d.rows[0]"),
        (-1, "keys are str, got -1 of type int; rows are d.rows[-1]"),
        (torch.tensor([True]), "keys are str, got Tensor; rows are d.rows[mask_or_indices]"),
        (None, "keys are str, got None of type NoneType"),
        (("n", 0), "keys are str, got 0 of type int in 'n'; rows are d.rows[0]"),
        (("image", 0), "a path is made of str, got int: 'image' is a tensor; index it as d['image'][...]"),
    )

    @pytest.mark.parametrize(("index", "message"), ROWS)
    def test_read_and_delete(self, index: Any, message: str) -> None:
        d = nested()
        refused(KeyError, message, lambda: d[index])
        refused(KeyError, message, lambda: d.__delitem__(index))

    @pytest.mark.parametrize("make", [nested, lambda: Batch(image=torch.ones(2))], ids=["plain", "typed"])
    @pytest.mark.parametrize(("index", "message"), [
        (0, "keys are str, got 0 of type int; use '0'; rows are d.rows[0]"),
        (slice(1, 3), "keys are str, got slice(1, 3, None) of type slice; rows are d.rows[1:3]"),
        (slice(None, 8, 2), "keys are str, got slice(None, 8, 2) of type slice; rows are d.rows[:8:2]"),
        (torch.tensor([0]), "keys are str, got Tensor; rows are d.rows[mask_or_indices]"),
    ])  # fmt: skip
    def test_write(self, index: Any, message: str, make: Callable[[], DeviceDict[Any]]) -> None:
        refused(TypeError, message, lambda: make().__setitem__(index, 1))

    @pytest.mark.parametrize(("index", "message"), [
        (["image", "n"], "keys are str, got list; several keys are d.select('image', 'n')"),
        ([0, 1], "keys are str, got list; rows are d.rows[mask_or_indices]"),
        (np.array([0]), "keys are str, got ndarray; rows are d.rows[mask_or_indices]"),
    ])  # fmt: skip
    def test_lists(self, index: Any, message: str) -> None:
        """Reads are those of `dict`, which asks a list for its hash first."""
        d: Any = nested()
        refused(TypeError, message, lambda: d.__setitem__(index, 1))
        refused(TypeError, message, lambda: d.__delitem__(index))

    def test_a_list_for_select(self) -> None:
        d: Any = nested()
        for use in (d.select, d.drop):
            text = "pass keys one by one, each a str or a path; got a list: ['image']"
            refused(TypeError, text, lambda use=use: use(["image"]))

    def test_slices(self) -> None:
        d = nested()
        message = "keys are str, got slice(1, 3, None) of type slice; rows are d.rows[1:3]"
        for use in (d.__getitem__, d.__delitem__):
            if sys.version_info >= (3, 12):  # before, a slice has no hash, and dict asks for that first
                refused(KeyError, message, lambda use=use: use(slice(1, 3)))  # pyright: ignore
            else:
                text = "unhashable type: 'slice'" if use == d.__getitem__ else message  # pyright: ignore
                refused(TypeError, text, lambda use=use: use(slice(1, 3)))  # pyright: ignore


RECIPES = Path(__file__).parent.parent / "docs" / "recipes.md"
INSTEAD = {
    name: way
    for names, way in re.findall(
        r"^\| (`\.\w+`.*?) \| `(.+?)`.* \|$", RECIPES.read_text(encoding="utf-8"), re.MULTILINE
    )
    for name in re.findall(r"`\.(\w+)`", names)
}
"""The table in docs/recipes.md: what to write instead of an attribute of other libraries."""


class TestAttributes:
    @pytest.mark.parametrize(("name", "way"), INSTEAD.items(), ids=list(INSTEAD))
    def test_what_other_libraries_have_has_another_name_here(self, name: str, way: str, tmp_path: Path) -> None:
        d = DeviceDict({"x": torch.ones(2)})
        assert not hasattr(DeviceDict, name)
        error = refused(AttributeError, f"'DeviceDict' object has no attribute {name!r}", lambda: getattr(d, name))
        assert getattr(error, "name") == name and getattr(error, "obj") is d  # noqa: B009
        save(d, tmp_path / "d")
        names = {"d": d, "mask": torch.tensor([True, False])}
        names |= {"key": "x", "keys": ["x"], "value": 1, "new": "y", "index": [0], "row": d.rows[0].copy(), "n": 1}
        names |= {"other": d.copy(), "function": torch.neg, "data": {"x": 1}, "dtype": torch.float64}
        exec(way, {**names, "torch": torch, "DeviceDict": DeviceDict, "path": tmp_path / "d"})

    def test_the_table_is_found(self) -> None:
        assert len(INSTEAD) > 90 and {"shape", "mean", "iloc", "load_memmap"} < INSTEAD.keys()

    def test_a_typed_class_may_have_them_as_fields(self) -> None:
        batch = Batch(image=torch.ones(2), shape=torch.ones(3))
        assert batch.shape is batch["shape"] and not hasattr(batch, "batch_size")

    def test_copies_and_pickles_ask_for_nothing_else(self) -> None:
        d = nested()
        assert pickle.loads(pickle.dumps(d)) == copy.deepcopy(d) == copy.copy(d) == d


class TestObjects:
    NONE = (
        "'x': expected a tensor, number, NumPy array, list of numbers, string, list of strings or mapping, "
        'got a NoneType; leave the key out, or build with objects="keep" to keep it as it is, on the host'
    )

    def test_the_way_out_of_none_is_open(self) -> None:
        refused(TypeError, self.NONE, lambda: DeviceDict({"x": None}))
        assert DeviceDict({"x": None}, objects="keep")["x"] is None
        fails(TypeError, rf"^sample 0: {re.escape(self.NONE)}$", lambda: collate([{"x": None}, {"x": None}]))
        batch = collate([{"x": None, "n": {"o": {1}}}, {"x": None, "n": {"o": {2}}}], objects="keep")
        assert batch["x"] == [None, None] and batch["n", "o"] == [{1}, {2}]
        assert DeviceDict(batch)["x"] == [None, None], "the policy stays with the batch"

    def test_collate_checks_the_option(self) -> None:
        bad: Any = "kept"
        refused(ValueError, "objects is 'error' or 'keep', got 'kept'", lambda: collate([{"x": 1}], objects=bad))

    def test_a_module_has_a_state(self) -> None:
        fails(TypeError, r"store its state_dict\(\)$", lambda: DeviceDict({"m": torch.nn.Linear(1, 1)}))


def _encoder(**members: Any) -> type[Any]:
    return type("Mine", (StringEncoder,), members)


D = DeviceDict({"x": [1.0, 2.0]})
PAIRS = "expected a mapping or an iterable of (key, value) pairs, got "
WRONG: dict[str, tuple[type[Exception], str, Callable[..., Any], tuple[Any, ...]]] = {
    "a tensor": (TypeError, PAIRS + 'Tensor; give the value a key: {"x": value}', DeviceDict, (torch.ones(3, 2),)),
    "an array": (TypeError, PAIRS + 'ndarray; give the value a key: {"x": value}', DeviceDict, (np.ones((3, 2)),)),
    "a module": (TypeError, PAIRS + "Linear; give it the state_dict()", DeviceDict, (torch.nn.Linear(1, 1),)),
    "typed": (TypeError, PAIRS + 'Tensor; give the value a key: {"x": value}', Batch, (torch.ones(2),)),
    "stack of none": (
        TypeError,
        "stack takes several dicts, in a list or another iterable, got a NoneType",
        stack,
        (None,),
    ),
    "cat of an int": (TypeError, "cat takes several dicts, in a list or another iterable, got an int", cat, (3,)),
    "stack of tensors": (
        TypeError,
        "stack takes mappings, dict 1 is float32[1]; torch.stack joins tensors",
        stack,
        ([D, torch.ones(1)],),
    ),
    "cat of numbers": (
        ValueError,
        "'a': expected a dimension to cat along, got one number a dict; use stack",
        cat,
        ([{"a": 1}, {"a": 2}],),
    ),
    "collate of none": (
        TypeError,
        "collate takes a list of samples, got a NoneType; for one sample write [sample]",
        collate,
        (None,),
    ),
    "prefetch of none": (
        TypeError,
        "prefetch takes a loader or another iterable of batches, got NoneType",
        prefetch,
        (None, "cpu"),
    ),
    "prefetch turned around": (
        TypeError,
        "a device is a str, a torch.device or an int, got [1] of type list",
        prefetch,
        ("cpu", [1]),
    ),
    "a device that is a dtype": (
        TypeError,
        "'float16' is the name of a dtype, not of a device; write torch.float16",
        D.to,
        ("float16",),
    ),
    "a plain container to a dtype": (
        TypeError,
        "'float16' is the name of a dtype, not of a device; write torch.float16",
        to_device,
        ({"x": 1}, "float16"),
    ),
    "no device": (
        TypeError,
        "a device is a str, a torch.device or an int, got None of type NoneType",
        to_device,
        (D, None),
    ),
    "save turned around": (
        TypeError,
        "save takes the data first: save(data, path), got 'x' as the data",
        save,
        ("x", {"x": 1}),
    ),
    "map of a name": (TypeError, "map takes a function of a tensor, got str", D.map, ("relu",)),
    "decode of a list": (
        TypeError,
        "pass keys one by one, each a str or a path; got a list: ['x']",
        D.decode,
        (["x"],),
    ),
    "an instance": (
        TypeError,
        "register_encoder takes a subclass of StringEncoder, got Utf8()",
        register_encoder,
        (Utf8(),),
    ),
    "an encoder of no base class": (
        TypeError,
        "register_encoder takes a subclass of StringEncoder, got <class 'test_error_messages.Mine'>",
        register_encoder,
        (type("Mine", (), {"name": "m"}),),
    ),
    "an encoder without a name": (
        TypeError,
        "the encoder class Mine has no name; set `name`, a unique str for files",
        register_encoder,
        (_encoder(),),
    ),
    "an encoder without JSON": (
        TypeError,
        "the encoder class Mine has no to_json, which its JSON form needs",
        register_encoder,
        (_encoder(name="m"),),
    ),
}


@pytest.mark.parametrize(("error", "message", "call", "given"), WRONG.values(), ids=WRONG)
def test_wrong_arguments(
    error: type[Exception], message: str, call: Callable[..., Any], given: tuple[Any, ...]
) -> None:
    refused(error, message, lambda: call(*given))


def test_wrong_options_of_collate() -> None:
    call: Any = collate
    refused(TypeError, "collate takes a DeviceDict class as cls=, got dict", lambda: call([{"x": 1}], cls=dict))
    refused(TypeError, "collate takes a DeviceDict class as cls=, got a mapping", lambda: call([{"x": 1}], cls=D))
    refused(
        TypeError,
        'collate takes a mapping from keys to fill values as pad=, as {"ids": 0}, got 0',
        lambda: call([{"x": 1}], pad=0),
    )


def test_errors_about_arguments_name_public_classes() -> None:
    """Python names the class that defines a method. A private base class must not appear in a message."""
    messages: list[str] = []

    class Point(TypedDeviceDict):
        x: torch.Tensor

    for d in (DeviceDict({"x": 1}), Point(x=torch.zeros(1))):
        for name in dir(type(d)):
            method = getattr(d, name, None)
            if name.startswith("_") or not inspect.ismethod(method):
                continue
            for args, options in (((None,) * 20, {}), ((), {"not_an_option": 1})):
                try:
                    method(*args, **options)
                except Exception as error:
                    messages.append(str(error))
    assert len(messages) > 40
    assert not [text for text in messages if re.search(r"TreeDict|\b_\w+\(|tensordict_lite\._", text)]


PACKAGE = Path(tensordict_lite.__file__).parent


def messages(module: Path) -> list[str]:
    """The text of each error that a module raises, with ``{}`` for what is computed."""
    raised = [
        node.exc for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))) if isinstance(node, ast.Raise)
    ]
    first = [one.args[0] for one in raised if isinstance(one, ast.Call) and one.args]
    parts = [one.values if isinstance(one, ast.JoinedStr) else [one] for one in first]
    texts = ["".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in one) for one in parts]
    return [text for text in texts if text != "{}"]


@pytest.mark.parametrize("module", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_message_has_one_form(module: Path) -> None:
    """``path: expected X, got Y; way out``, or ``function takes X, got Y; way out``: one sentence without a period."""
    for text in messages(module):
        assert not re.search(r"[^.]\.$|[^.?]\. [A-Z]|\n", text), (
            f"one sentence, and a semicolon before the way out: {text}"
        )
        assert not re.search(r"\b(is|are|has|gave|got) [^;]*, expected ", text), f"first expected, then got: {text}"
        assert not re.search(r": expected (?!.*, (got |\{\}))", text), f"after expected, say what came: {text}"
        assert text.count("; ") < 3, f"one way out: {text}"


STATES = {
    "is on ": "the device of a tensor: torch says so too",
    "is in ": "a column that a table has",
    "is a field already": "a name, not a value",
    "is not in ": "a missing key",
    "has the last columns": "a folder",
    "is nested more than": "a tree",
    "is a list that": "a tree",
    "is {tensor.dtype}: {reason}": "an error of torch",
    "cannot be sent": "an error of pickle",
    "has rows of the same lengths": "two fields",
    "has offsets in the memory": "two fields",
    "and {": "two fields",
    "is a {type(value).__name__} that": "a tree",
    "of this table is encoded": "two encoders",
    "{message}": "an error of torch",
    "{reason}": "the state of a tensor that cannot be written, such as an expanded one",
    "{said}": "the same",
}
"""What a message may say of a path, beside what it expected and got."""


@pytest.mark.parametrize("module", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_path_is_followed_by_what_was_expected(module: Path) -> None:
    for raised in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if not (isinstance(raised, ast.Raise) and isinstance(raised.exc, ast.Call) and raised.exc.args):
            continue
        text = ast.unparse(raised.exc.args[0])
        if found := re.match(r"f['\"]+\{dotted\([^}]*\)\} (.*)", text):
            assert found[1].startswith(tuple(STATES)), text
