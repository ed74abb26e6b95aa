"""What users may rely on stands in public_api.txt: a change of a public name or signature is seen, and meant.

``python tests/test_public_api.py`` writes the file again.
"""

from __future__ import annotations

import difflib
import inspect
import re
from pathlib import Path
from typing import Any

import tensordict_lite
from tensordict_lite import DeviceDict, distributed, tables, unpickle

ROOT = Path(__file__).parent.parent
LIST = Path(__file__).parent / "public_api.txt"
SPECIAL = {f"__{name}__" for name in ("init", "len", "iter", "getitem", "getitems", "setitem", "delitem", "contains")}


def described(name: str, member: Any) -> str:
    """A name; of a function, with the parameters and their defaults. Annotations may become more precise."""
    if isinstance(member, (staticmethod, classmethod)):
        function: Any = member.__func__
        return f"{described(name, function)}: {type(member).__name__}"
    if not inspect.isroutine(member):
        return f"{name}: property" if isinstance(member, property) else name
    parameters = [one.replace(annotation=one.empty) for one in inspect.signature(member).parameters.values()]
    text = re.sub(r"<object object at \w+>", "...", str(inspect.Signature(parameters)))
    return name + re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text)


def members(cls: type) -> dict[str, Any]:
    """The public members that a class has from this package, and the special methods of a container."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("tensordict_lite"):
            found |= vars(base)
    # A hint for a missing method, such as `d.mean`, is a descriptor that raises AttributeError.
    return {name: found[name] for name in found if name in SPECIAL or (name[0] != "_" and hasattr(cls, name))}


def public() -> list[str]:
    """Every public name of the package, one a line. A subclass names only what it adds or replaces."""
    names = {name: getattr(tensordict_lite, name) for name in sorted(tensordict_lite.__all__)}
    rows = DeviceDict({"x": [1.0]}).rows
    names |= {"Rows": type(rows), "Windows": type(rows.windows({"x": range(1)}))}
    names |= {"Report": type(tensordict_lite.prefetch([], "cpu").report())}
    for module in (distributed, tables):
        prefix = module.__name__.rpartition(".")[2]
        names |= {f"{prefix}.{name}": getattr(module, name) for name in sorted(module.__all__)}
    names |= {
        f"unpickle.{name}": value
        for name, value in sorted(vars(unpickle).items())
        if value.__class__ is type(described)
    }
    found: list[str] = []
    for name, value in names.items():
        if not inspect.isclass(value):
            found.append(described(name, value))
            continue
        parents = [base for base in value.__mro__[1:-1] if base.__module__ == "builtins" or base in names.values()]
        found.append(f"class {name}({', '.join(base.__name__ for base in parents)})")
        inherited = {key: member for base in parents for key, member in members(base).items()}
        own = {key: member for key, member in members(value).items() if inherited.get(key) is not member}
        found += [described(f"{name}.{key}", own[key]) for key in sorted(own)]
    return found


def test_the_public_names_and_signatures_are_those_of_the_list() -> None:
    committed, now = LIST.read_text(encoding="utf-8").splitlines(), public()
    changes = "\n".join(difflib.unified_diff(committed, now, "tests/public_api.txt", "the package", lineterm="", n=0))
    assert not changes, (
        f"{changes}\nThe public interface differs from tests/public_api.txt. If you mean it, read Versions and "
        "deprecation in CONTRIBUTING.md and run `python tests/test_public_api.py`"
    )


def test_one_version_stands_everywhere() -> None:
    """Between releases, the version of the package is the next one with `.dev0`."""
    version = tensordict_lite.__version__.removesuffix(".dev0")
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"Version {version} " in (ROOT / "README.md").read_text(encoding="utf-8")


if __name__ == "__main__":
    LIST.write_text("\n".join(public()) + "\n", encoding="utf-8")
