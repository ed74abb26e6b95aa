"""CONTRIBUTING says what a common change touches. Here a test fails for each step that is left out."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import option_paths
import pytest
import torch
from checks import fails
from test_encoders import ENCODERS

import tensordict_lite
from tensordict_lite import DeviceDict, StringEncoder, Tokenizer, encoder_to_json

ROOT = Path(__file__).parent.parent
PACKAGE = Path(tensordict_lite.__file__).parent
DOC = inspect.getdoc(DeviceDict) or ""  # without the indentation, which newer versions of Python do not keep


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_every_common_change_has_its_tests() -> None:
    changes = page("CONTRIBUTING.md").split("\n## Common changes\n")[1].split("\n## ")[0]
    assert re.findall(r"^### (.*)$", changes, re.M) == [
        "Add a string encoder",  # TestAddAStringEncoder
        "Add a kind of field",  # test_kinds.py
        "Add an option of the constructor",  # TestAddAnOption, test_option_paths.py
        "Measure again",  # test_figures.py
        "Add a method",  # TestAddAMethod, test_option_paths.py, test_docs.py
        "Change a file format",  # test_file_format.py
    ], "add the tests of the new change, and name them here"


def encoders() -> list[type[StringEncoder]]:
    """The encoder classes of the package, except the wrapper of other objects."""
    found = [cls for cls in StringEncoder.__subclasses__() if cls.__module__ == "tensordict_lite"]
    inside = {
        node.name
        for path in (PACKAGE / "_encoders").glob("*.py")
        for node in ast.parse(page(str(path))).body
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "StringEncoder" for base in node.bases)
    }
    assert inside - {cls.__name__ for cls in found} == {"WrappedEncoder"}, "export the class in __init__.py"
    return found


class TestAddAStringEncoder:
    @pytest.mark.parametrize("cls", encoders())
    def test_steps(self, cls: type[StringEncoder]) -> None:
        name = cls.__name__
        assert name in tensordict_lite.__all__
        assert f"| `{name}(" in page("docs/strings.md"), "add a row to the table of encoders"
        assert f"::: tensordict_lite.{name}\n" in page("docs/reference/strings.md")
        if cls is not Tokenizer:  # has tests of its own
            assert cls in map(type, ENCODERS), "add an instance to ENCODERS"
            assert encoder_to_json(next(one for one in ENCODERS if type(one) is cls))["name"] == cls.name

    def test_no_other_module_asks_for_a_class(self) -> None:
        names = {cls.__name__ for cls in encoders()}
        for path in PACKAGE.rglob("*.py"):
            for node in ast.walk(ast.parse(page(str(path)))):
                if (
                    path.parent.name != "_encoders"
                    and isinstance(node, ast.Call)
                    and ast.unparse(node.func) == "isinstance"
                ):
                    asked = {inner.id for inner in ast.walk(node.args[1]) if isinstance(inner, ast.Name)}
                    assert not asked & names, f"{path.name}:{node.lineno}: let the encoder say it"


def options() -> list[str]:
    """The options of the constructor, as its error lists them."""
    with pytest.raises(TypeError) as caught:
        DeviceDict(nope=1)  # type: ignore[call-arg]
    found = re.search(r"its options are ([^;]*);", str(caught.value))
    assert found
    return found[1].split(", ")


class TestAddAnOption:
    @pytest.mark.parametrize("option", options())
    def test_it_is_documented(self, option: str) -> None:
        assert f"\n    {option}: " in DOC, "document it in the docstring of DeviceDict"
        assert f"\n| `{option}=` |" in page("docs/storing.md"), "add a row to the table of options"
        assert f"{option}=None" in page("docs/reference.md").split("## Methods")[0]


LIKELY_FIELDS = [
    "x", "y", "image", "images", "pixels", "label", "labels", "target", "mask", "weight", "weights", "ids", "input_ids",
    "tokens", "text", "texts", "name", "names", "id", "index", "state", "action", "reward", "done", "obs", "mean",
    "std", "loss", "logits", "score", "scores", "length", "lengths", "time", "step", "value_", "position", "features",
]  # fmt: skip


class TestAddAMethod:
    PUBLIC = sorted(name for name in vars(DeviceDict) if not name.startswith("_") and hasattr(DeviceDict, name))

    @pytest.mark.parametrize("name", PUBLIC)
    def test_it_is_in_the_index_of_the_class(self, name: str) -> None:
        own = DOC.split("Each kind of value")[0]
        assert f"`{name}`" in own or name.startswith(("from_", "to_")), "name it in the docstring of DeviceDict"

    def test_it_hides_no_likely_field(self) -> None:
        assert not [name for name in LIKELY_FIELDS if hasattr(DeviceDict, name)]

    @pytest.mark.parametrize("name", PUBLIC)
    def test_the_work_is_a_function_of_its_topic(self, name: str) -> None:
        member = inspect.getattr_static(DeviceDict, name)
        function = getattr(member, "__func__", getattr(member, "fget", member))
        body = ast.parse(inspect.cleandoc("\n" + inspect.getsource(function))).body[0]
        assert isinstance(body, ast.FunctionDef)
        lines = sum((one.end_lineno or 0) - one.lineno + 1 for one in body.body[1:])
        assert lines <= 15, "the method is a docstring and a few lines"

    @pytest.mark.parametrize(
        "name",
        [name for name in PUBLIC if name.endswith("_") and name not in ("requires_grad_", "share_memory_", "to_")],
    )
    def test_in_place_it_changes_all_fields_or_none(self, name: str) -> None:
        d = DeviceDict({"x": torch.ones(2), "n": {"y": torch.ones(1).expand(2)}, "z": torch.ones(2)})
        other = d.map(torch.ones_like)
        other["x"] += 2
        given: Any = {"lerp_": (other, 0.5), "zero_": ()}.get(name, (other,))
        fails(RuntimeError, r"'n\.y'", lambda: getattr(d, name)(*given))
        assert d["x"].tolist() == d["z"].tolist() == [1, 1]

    def test_it_keeps_the_options(self) -> None:
        """`option_paths.methods` calls every method that returns a dict. A new one gets its arguments there."""
        assert {"clone", "to", "rows.split"} <= option_paths.methods().keys()
