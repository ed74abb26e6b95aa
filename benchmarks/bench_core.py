"""Operations of small fields on the CPU, where a plain dict or a loop takes less time than a DeviceDict.

    python benchmarks/bench_core.py [--quick] [--rounds N] [--only TEXT] [--json PATH]

A field is float32[32, 2], so the time is that of the container.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from harness import DICT, OURS, Case, Fields, Prepare, main, statement

from tensordict_lite import DeviceDict, TypedDeviceDict

WRITE = "for k, v in others: x[k] = v\nfor k, v in fields: x[k] = v"
# By operation: the code for a DeviceDict and for a plain dict, and for statements what must be equal after them.
CONTAINER = {
    "read": ('x["k3"]', 'x["k3"]', ""),
    "membership": ('"k3" in x', '"k3" in x', ""),
    "write": (WRITE, WRITE, "x"),
    "construct": ('DeviceDict(s, device="cpu")', "dict(s)", ""),
    "rows 8 to 16": ("x.rows[8:16]", "{k: v[8:16] for k, v in x.items()}", ""),
    "one row": ("x.rows[3]", "{k: v[3] for k, v in x.items()}", ""),
}
IN_PLACE = {
    "lerp_": ("x.lerp_(y, 0.01)", "for k, v in x.items(): v.lerp_(y[k], 0.01)", "x"),
    "add_": ("x.add_(y)", "for k, v in x.items(): v.add_(y[k])", "x"),
    "copy_": ("x.copy_(y)", "for k, v in x.items(): v.copy_(y[k])", "x"),
    "zero_": ("x.zero_()", "for k, v in x.items(): v.zero_()", "x"),
}


def fields(count: int) -> Fields:
    # Intern the keys, as Python interns literals: finding an equal str with another address takes up to twice as long.
    return {sys.intern(f"k{i}"): torch.rand(32, 2) for i in range(count)}


def close(x: Any, y: Any) -> bool:
    """Whether two results are equal. A loop may round otherwise."""
    if isinstance(x, Mapping):
        return x.keys() == y.keys() and all(torch.allclose(x[key], y[key]) for key in x)
    return bool(torch.as_tensor(x == y).all())


def case(operation: str, count: int) -> Case:
    s, others = fields(count), fields(count)
    ours, plain, result = (CONTAINER | IN_PLACE)[operation]

    def contender(code: str, container: Callable[[Fields], Any]) -> Prepare:
        names: dict[str, Any] = {"s": s, "y": container(others), "DeviceDict": DeviceDict}
        names |= {"fields": list(s.items()), "others": list(others.items())}
        return statement(code, lambda _: container({key: v.clone() for key, v in s.items()}), result, **names)

    return Case(
        operation, f"{count} fields", {OURS: contender(ours, DeviceDict), DICT: contender(plain, dict)}, equal=close
    )


def attribute_case(count: int) -> Case:
    def typed(data: Fields) -> TypedDeviceDict:
        made: Any = type("Typed", (TypedDeviceDict,), {"__annotations__": dict.fromkeys(data, torch.Tensor)})
        return made(data)

    contenders = {OURS: statement("x.k3", typed), "by key": statement('x["k3"]', typed)}
    return Case("attribute, typed", f"{count} fields", contenders, partial(fields, count))


def cases() -> list[Case]:
    return [
        *(case(operation, count) for count in (8, 100) for operation in CONTAINER),
        *(attribute_case(count) for count in (8, 100)),
        *(case(operation, 8 if operation == "lerp_" else 400) for operation in IN_PLACE),
    ]


if __name__ == "__main__":
    main(__doc__, cases)
