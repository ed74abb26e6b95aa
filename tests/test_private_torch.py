"""The private names of torch that the package uses: each has a reason, and a new torch that drops one is told here."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest
import torch

import tensordict_lite

FOREACH = "one call for a list of tensors; documented, in beta, under these names"
REASONS = {
    "torch.Tensor._base": "whether a view of a leaf is written in place; there is no public name",
    "torch.Tensor._indices": "`indices()` refuses a sparse tensor that is not coalesced",
    "torch.Tensor._values": "`values()` refuses it too",
    "torch.Tensor._is_view": "whether a view of a leaf is written in place, and for the repr; there is no public name",
    "torch.Tensor._version": "whether memory was written since; there is no public name",
    "torch.UntypedStorage._new_shared": "`share_memory_()` would copy the new memory; torch's own collate calls it",
    "torch._C.DisableTorchFunctionSubclass": "documented under this name for `__torch_function__`",
    "torch._C._autograd": "whether autograd lets a view be written in place; there is no public name",
    "torch._C._functorch.peek_interpreter_stack": "whether vmap or grad runs; there is no public name",
    "torch._C._len_torch_dispatch_stack": "whether a dispatch mode is active; there is no public name",
    "torch._foreach_add_": FOREACH,
    "torch._foreach_copy_": FOREACH,
    "torch._foreach_div_": FOREACH,
    "torch._foreach_lerp_": FOREACH,
    "torch._foreach_mul_": FOREACH,
    "torch._foreach_norm": FOREACH,
    "torch._foreach_sub_": FOREACH,
    "torch._foreach_zero_": FOREACH,
    "torch._utils.ExceptionWrapper": "what a DataLoader raises again in the main process",
    "torch.autograd.forward_ad._current_level": "whether forward-mode AD is active; there is no public name",
    "torch._check": "the documentation of torch.export names it: a condition on a number that a program computes",
    "torch.utils._pytree": "no supported torch has a public name for its pytree in Python",
    "torch.utils.data._utils.collate.default_collate_fn_map": "documented as the place to register a type",
}
MODULES = sorted(Path(tensordict_lite.__file__).parent.rglob("*.py"))
ON_INSTANCES = {name for kind in (torch.Tensor, torch.UntypedStorage) for name in dir(kind)}


def private_names(source: str) -> set[str]:
    """The private names of torch in a module, each up to its private part or below: ``torch._C._is_tracing``.

    An attribute of an unknown object counts if tensors have it.
    """
    tree, known = ast.parse(source), dict[str, str]()

    def dotted(node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return known.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = dotted(node.value)
            return (
                f"{owner}.{node.attr}" if owner else f"torch.Tensor.{node.attr}" if node.attr in ON_INSTANCES else None
            )
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "cast" and len(node.args) == 2:
                return dotted(node.args[1])
            if node.func.id == "getattr" and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
                owner = dotted(node.args[0])
                return owner and f"{owner}.{node.args[1].value}"
        return None

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known.update(
                {
                    name.asname or "torch": (name.asname and name.name) or "torch"
                    for name in node.names
                    if name.name.startswith("torch")
                }
            )
        elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("torch.") and not node.level:
            known.update({name.asname or name.name: f"{node.module}.{name.name}" for name in node.names})
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.expr) and (name := dotted(value)):
            known[target.id] = name
    names = {name for node in ast.walk(tree) if isinstance(node, ast.expr) and (name := dotted(node))} | set(
        known.values()
    )
    public = {"_replace"}  # of a NamedTuple
    return {name for name in names if any(part[0] == "_" != part[1:2] for part in {*name.split(".")[1:]} - public)}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_each_private_name_has_a_reason(path: Path) -> None:
    for name in private_names(path.read_text()):
        listed = [
            reason for reason in REASONS if f"{name}.".startswith(f"{reason}.") or f"{reason}.".startswith(f"{name}.")
        ]
        assert listed, f"{path.name} uses {name}: use a public name, or add it and the reason to REASONS"


@pytest.fixture(scope="module")
def used() -> set[str]:
    return {name for path in MODULES for name in private_names(path.read_text())}


@pytest.mark.parametrize("name", REASONS)
def test_the_package_uses_it(name: str, used: set[str]) -> None:
    assert any(f"{other}.".startswith(f"{name}.") for other in used), f"no module uses {name}: delete its reason"


@pytest.mark.parametrize("name", sorted(REASONS))
def test_torch_has_it(name: str) -> None:
    found, at = torch, "torch"
    for part in name.split(".")[1:]:
        at += f".{part}"
        if not hasattr(found, part):
            try:
                found = importlib.import_module(at)
            except ImportError:
                pytest.fail(f"torch {torch.__version__} has no {at}, which the package uses: {REASONS[name]}")
        found = getattr(found, part, found)
    assert found is not torch


def test_the_search_finds_each_way_to_name_it() -> None:
    source = """
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
_C: Any = torch._C
_functorch = cast(Any, _C)._functorch
save = getattr(torch.serialization, "_save", None)
def f(t): return t._version, Tensor._base, pytree.tree_map, _functorch.peek(), torch.add_, t.__class__, t.values()
"""
    assert private_names(source) == {
        "torch._C", "torch._C._functorch", "torch._C._functorch.peek", "torch.serialization._save",
        "torch.Tensor._version", "torch.Tensor._base", "torch.utils._pytree", "torch.utils._pytree.tree_map",
    }  # fmt: skip


def test_the_mark_of_a_constant_function() -> None:
    """`_dict/torch_functions.py` sets the mark itself, as the public function imports the whole compiler."""

    def function() -> None:
        pass

    assert vars(torch.compiler.assume_constant_result(function)) == {"_dynamo_marked_constant": True}


def test_a_storage_is_one_object_of_python() -> None:
    """`share_memory` compares storages with ``is``, because their addresses take half as long again."""
    tensor = torch.zeros(4, 2)
    views = (
        tensor[1],
        tensor.T,
        tensor.detach(),
        tensor.view(torch.int32),
        torch.zeros(0).set_(tensor.untyped_storage()),
    )
    assert all(view.untyped_storage() is tensor.untyped_storage() for view in views)
    assert torch.zeros(4, 2).untyped_storage() is not tensor.untyped_storage()
