"""The signatures of the reference, as a caller may use them.

The options that a function takes as ``**options`` stand by name, ``to(*args, **kwargs)`` has the parameters of its
overloads, and a default that stands for "not given" is ``...``.
"""

from __future__ import annotations

from typing import Any

import griffe

from tensordict_lite._tree.policy import Options


class Signatures(griffe.Extension):
    """Rewrites the parameters of each function of the package."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Rewrite all of them."""
        self._walk(pkg)

    def _walk(self, parent: Any) -> None:
        for member in parent.members.values():
            if member.is_alias:
                continue
            if member.is_function:
                for overload in member.overloads or ():
                    _rewrite(overload)
                _rewrite(member)
            elif member.is_module or member.is_class:
                for overloads in parent.overloads.values() if member.is_class else ():
                    for overload in overloads:
                        _rewrite(overload)
                self._walk(member)


def _rewrite(function: griffe.Function) -> None:
    found: dict[str, griffe.Parameter] = {}
    for one in function.parameters:
        kind, default = one.kind, str(one.default)
        if "Unpack[Options]" in str(one.annotation):
            named = griffe.ParameterKind.keyword_only
            found |= {name: griffe.Parameter(name, kind=named, default="None") for name in Options.__annotations__}
        elif kind is griffe.ParameterKind.var_positional and str(one.annotation) == "Never":
            continue  # there for its error
        else:
            if default.startswith("_"):
                one.default = "..."
            found[one.name] = one
    if function.overloads and "args" in found:
        found = {one.name: one for overload in function.overloads for one in overload.parameters}
    if found and [*found.values()][-1].kind is griffe.ParameterKind.positional_only:
        found["/"] = griffe.Parameter("/", kind=griffe.ParameterKind.positional_only)  # the template leaves it out
    function.parameters = griffe.Parameters(*found.values())
    for one in function.parameters:
        one.function = function
