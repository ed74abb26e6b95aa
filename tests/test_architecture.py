"""How the package is built: imports run downward, every module imports alone, and importing it brings little."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors  # pyright: ignore[reportPrivateUsage]

PACKAGE = Path(__file__).parent.parent / "tensordict_lite"


def inside(package: str, names: str) -> list[str]:
    return [f"{package}.{name}" for name in names.split()]


# From the bottom up: a module imports only from modules before it.
ORDER = [
    "_errors",
    *inside("_memory", "dtypes device arguments layout write buffer dense packed compare ragged row_copies spans cast"),
    *inside("_memory", "staging transfer mapped"),
    *inside("_encoders", "protocol builtin tokenizer"),
    *inside("_tree", "missing policy frames pytree convert row_index ragged alike inside kinds walk compare tree"),
    *inside("_tree", "fields manifest encoding sendable"),
    *inside("_look", "page tree values progress describe"),
    *inside("_files", "atomic_write safetensors"),
    *inside("tables", "format reader"),  # all that the core needs, when it loads a table
    *inside("_dict", "insert row_values row_assignment by_value windows rows arithmetic fill"),
    *inside("_dict", "torch_functions device_dict schema typed io"),
    "unpickle",
    *inside("_batch", "pad join make_fields collate containers shuffle visits order ordered_loader joined_rows report"),
    "_batch.prefetch",
    *inside("tables", "folder verify table writer parts columns __init__"),
    *inside("distributed", "message channel verbs __init__"),
    "__init__",
    "__main__",
]


def path_of(module: str) -> Path:
    return PACKAGE / (module.replace(".", "/") + ".py")


def imports(module: str) -> set[str]:
    """The modules of the package that a module imports from."""
    found: set[str] = set()
    parents = module.split(".")[:-1]
    for node in ast.walk(ast.parse(path_of(module).read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = [*parents[: len(parents) + 1 - node.level], *(node.module.split(".") if node.module else [])]
        for alias in node.names:
            name = ".".join([*base, alias.name])
            found.add(name if path_of(name).is_file() else ".".join(base))
    return found


def test_every_module_has_its_place() -> None:
    files = {".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    private = {name for name in files if name.startswith("_") and name.endswith(".__init__")}
    assert files - private == set(ORDER)


def test_the_drawing_has_every_module() -> None:
    text = (PACKAGE.parent / "docs" / "contributors" / "architecture.md").read_text(encoding="utf-8")
    drawing = "".join(line for line in text.split("```")[1].splitlines() if not line.startswith("+"))
    modules = [name.split(".")[1] for name in ORDER if "." in name and not name.endswith("__init__")]
    assert sorted(re.findall(r"\w+", drawing)) == sorted(modules)


@pytest.mark.parametrize("module", ORDER)
def test_imports_run_downward(module: str) -> None:
    assert imports(module) <= set(ORDER[: ORDER.index(module)])


ONE_MEANING = {
    "__all__": "Python asks for this name",
    "B": "a type variable",
    "D": "a type variable",
    "T": "a type variable",
    "compare": "modules that compare, two tensors and two trees",
    "ragged": "modules of ragged fields, their offsets and their class",
    "tree": "modules of a tree of dicts, what it is and how it is shown",
}
"""The names that stand in two modules, with their one meaning."""


def defined(module: str) -> set[str]:
    """The names that a module defines."""
    names: set[str] = set()
    for node in ast.parse(path_of(module).read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {
                one.id
                for target in targets
                for one in ast.walk(target)
                if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
            }
    return names


def test_one_name_has_one_meaning() -> None:
    modules = Counter(name.split(".")[-1] for name in ORDER if not name.endswith("__init__"))
    names = Counter(name for module in ORDER for name in defined(module))
    twice = {name for counter in (modules, names) for name, count in counter.items() if count > 1}
    assert twice == ONE_MEANING.keys(), "rename one of them, by what it means"


def test_below_the_class_nothing_knows_it() -> None:
    for module in ORDER[: ORDER.index("_dict.device_dict")]:
        assert "_dict.device_dict" not in imports(module)


def test_three_classes_and_no_more() -> None:
    from tensordict_lite import DeviceDict, TypedDeviceDict  # noqa: PLC0415  (the other tests import no part of it)

    chain = [cls.__name__ for cls in TypedDeviceDict.__mro__ if cls.__module__.startswith("tensordict_lite")]
    assert chain == ["TypedDeviceDict", "DeviceDict", "TreeDict"] and issubclass(TypedDeviceDict, DeviceDict)


@pytest.mark.slow
def test_every_module_imports_alone_and_without_a_warning() -> None:
    # Each under an empty stand-in for the package, whose __init__ would import all the others first. torch is imported
    # once, in the parent of the forks: once for each would be most of the suite's time.
    program = f"""
import importlib, os, sys, types, torch
for module in {[name for name in ORDER if not name.endswith("__init__")]!r}:
    child = os.fork()
    if not child:
        try:
            package = sys.modules["tensordict_lite"] = types.ModuleType("tensordict_lite")
            package.__path__ = [{str(PACKAGE)!r}]
            importlib.import_module(f"tensordict_lite.{{module}}")
            os._exit(0)
        except BaseException as error:
            print(module, repr(error), flush=True)
            os._exit(1)
    if os.waitpid(child, 0)[1]:
        sys.exit(1)
"""
    done = subprocess.run(
        [sys.executable, "-I", "-W", "error", "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_importing_brings_only_what_torch_brings_already() -> None:
    program = (
        "import torch, numpy, typing_extensions, sys; before = set(sys.modules)\n"
        "import tensordict_lite as t\n"
        "class B(t.TypedDeviceDict):\n    x: torch.Tensor\n    n: t.DeviceDict\n"
        "B(x=torch.zeros(2), n={}).to(torch.float64)\n"  # no jaxtyping, unless a class uses it
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}), torch.cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    *brought, cuda = done.stdout.split()
    assert set(brought) - set(sys.stdlib_module_names) == {"tensordict_lite"} and cuda == "False"


CONSTRUCTORS = {function.__name__ for function in _device_constructors()}
"""The functions of torch that create a tensor on the default device, if the call names no device."""


@pytest.mark.parametrize("module", ORDER)
def test_every_new_tensor_names_its_device(module: str) -> None:
    """A program may set any default device. Only `torch.empty(0).device` asks for it.

    `as_tensor` keeps the device of an array of another library.
    """
    nodes = list(ast.walk(ast.parse(path_of(module).read_text(encoding="utf-8"))))
    asked = {id(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr == "device"}
    asked |= {id(node) for node in nodes if ast.unparse(node) == "torch.as_tensor(value)"}
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{name}" for name in CONSTRUCTORS}:
            assert id(node) in asked or "device" in {option.arg for option in node.keywords}, ast.unparse(node)


def test_only_loading_a_table_imports_tables(tmp_path: Path) -> None:
    program = (
        "import sys, tensordict_lite as t; found = lambda: any('.tables' in m for m in sys.modules)\n"
        "t.DeviceDict({'x': [1]}).save('d.safetensors'); t.load('d.safetensors'); before = found()\n"
        "try:\n    t.load('.')\nexcept IsADirectoryError:\n    print(before, found())"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_three_dependencies_and_no_more() -> None:
    required = importlib.metadata.requires("tensordict_lite") or []
    assert sorted(r for r in required if "extra" not in r) == ["numpy", "torch>=2.7", "typing-extensions>=4.13"]


def functions_in(path: Path) -> dict[str, set[str]]:
    """The words of each function of a module, and of the methods of its classes, by name."""
    text = path.read_text(encoding="utf-8")
    body, lines = ast.parse(text).body, text.splitlines()
    nodes = [*body, *(inner for node in body if isinstance(node, ast.ClassDef) for inner in node.body)]
    return {
        node.name: set(re.findall(r"\w+", "\n".join(lines[node.lineno : node.end_lineno])))
        for node in nodes
        if isinstance(node, ast.FunctionDef)
    }


def test_every_test_checks_something() -> None:
    """It asserts, expects an error, or uses a function that does, of its module or of a module of helpers."""
    files = [path for path in Path(__file__).parent.rglob("*.py") if "golden" not in path.parts]
    modules = {path: functions_in(path) for path in files}
    helpers = {
        name: words for path in files if not path.name.startswith("test_") for name, words in modules[path].items()
    }
    for path, functions in modules.items():
        known, checks, found = {**helpers, **functions}, {"assert", "raise", "raises", "warns"}, 0
        while len(checks) > found:
            found = len(checks)
            checks |= {name for name, words in known.items() if checks & words}
        assert not [name for name in functions if name.startswith("test") and name not in checks], path.name
