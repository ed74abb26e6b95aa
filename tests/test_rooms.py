"""How the package is built: imports run downward, every module imports alone, no file outgrows one sitting."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "tensordict_lite"
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py"))

# From the ground up: a room imports from rooms before it only.
ORDER = [
    "_errors", "_missing", "_devices", "_layout", "_block", "_packing", "_singly", "_transfer", "_strings", "_encoders", "_tokenizer", "_policy", "_tables", "_values", "_items", "_compare", "_pytree",
    "_display", "_replace", "_tree", "_plan", "_disk", "_saved", "_sendable", "_arguments", "_checked", "_movable", "_shaping", "_rows", "_device_dict", "_join", "_schema", "_typed", "_io", "_collate", "_plain", "_prefetch", "_message", "_wire", "distributed",
    "__init__",
]  # fmt: skip


def imports(module: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            found |= {node.module} if node.module else {alias.name for alias in node.names}
    return found


def test_every_module_has_its_place() -> None:
    assert sorted(ORDER) == MODULES


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_downward(module: str) -> None:
    assert imports(module) <= set(ORDER[: ORDER.index(module)])


def test_below_the_class_nothing_knows_it() -> None:
    for module in ORDER[: ORDER.index("_tree")]:
        assert not imports(module) & {"_tree", "_checked", "_movable", "_device_dict"}


@pytest.mark.parametrize("module", MODULES)
def test_a_file_is_read_in_one_sitting(module: str) -> None:
    assert len((PACKAGE / f"{module}.py").read_text(encoding="utf-8").splitlines()) < 400


def test_every_module_imports_alone_and_without_a_warning() -> None:
    # Each under an empty stand-in for the package, whose __init__ would import all the others first. torch is imported
    # once, in the parent of the forks: once for each would be most of the suite's time.
    program = f"""
import importlib, os, sys, types, torch
for module in {MODULES!r}:
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


def test_importing_brings_only_what_torch_brings_already() -> None:
    program = (
        "import torch, numpy, typing_extensions, sys; before = set(sys.modules); import tensordict_lite;"
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}), torch.cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    *brought, cuda = done.stdout.split()
    assert set(brought) - set(sys.stdlib_module_names) == {"tensordict_lite"} and cuda == "False"


def test_three_dependencies_and_no_more() -> None:
    required = importlib.metadata.requires("tensordict_lite") or []
    assert sorted(r for r in required if "extra" not in r) == ["numpy", "torch>=2.7", "typing-extensions>=4.13"]
