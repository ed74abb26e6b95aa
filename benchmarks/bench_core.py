"""Operations of small fields on the CPU, where a plain dict or a loop takes less time than a DeviceDict.

    python benchmarks/bench_core.py [--quick] [--rounds N] [--only TEXT] [--json PATH]

The fields are small, so the time is that of the container.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from harness import DICT, OURS, Case, Fields, main, statement

from tensordict_lite import DeviceDict, TypedDeviceDict

BY_KEY = "by key"
Pair = tuple[Fields, Fields]  # equal keys and shapes


def pair(count: int, shape: Callable[[int], tuple[int, ...]]) -> Pair:
    """Fields of these shapes, and others of the same shapes."""
    # Intern the keys, as Python interns literals: finding an equal str with another address takes up to twice as long.
    keys = [sys.intern(f"k{i}") for i in range(count)]
    first, second = ({key: torch.rand(shape(i)) for i, key in enumerate(keys)} for _ in range(2))
    return first, second


def typed(data: Pair) -> TypedDeviceDict:
    made: Any = type("Typed", (TypedDeviceDict,), {"__annotations__": dict.fromkeys(data[0], torch.Tensor)})
    return made(data[0])


def of(container: Any, data: Pair) -> tuple[Any, Any]:
    """Containers ``d`` and ``e``. The tensors of the first are copies, which the code may change."""
    return container({key: tensor.clone() for key, tensor in data[0].items()}), container(data[1])


def close(x: Mapping[str, Any], y: Mapping[str, Any]) -> bool:
    return x.keys() == y.keys() and all(torch.allclose(x[key], y[key]) for key in x)


WRITE = "for k, v in others: x[k] = v\nfor k, v in fields: x[k] = v"
# By operation: the code for a DeviceDict and for a plain dict.
WHOLE = {
    "lerp_": ("d.lerp_(e, 0.01)", "for k, v in d.items(): v.lerp_(e[k], 0.01)"),
    "add_": ("d.add_(e)", "for k, v in d.items(): v.add_(e[k])"),
    "copy_": ("d.copy_(e)", "for k, v in d.items(): v.copy_(e[k])"),
    "zero_": ("d.zero_()", "for k, v in d.items(): v.zero_()"),
}


def container_cases(count: int) -> list[Case]:
    data = pair(count, lambda _: (32, 2))
    lists: dict[str, Any] = {"fields": list(data[0].items()), "others": list(data[1].items())}

    def case(operation: str, code: str, plain: str | None = None, result: str = "") -> Case:
        contenders = {
            OURS: statement(code, lambda s: DeviceDict(s[0]), result, DeviceDict=DeviceDict, **lists),
            DICT: statement(plain or code, lambda s: dict(s[0]), result, **lists),
        }
        return Case(operation, f"{count} fields", contenders, lambda: data)

    attribute = {OURS: statement("x.k3", typed), BY_KEY: statement('x["k3"]', typed)}
    return [
        case("read", 'x["k3"]'),
        case("membership", '"k3" in x'),
        case("write", WRITE, result="x"),
        case("construct", 'DeviceDict(x, device="cpu")', "dict(x)"),
        case("rows 8 to 16", "x.rows[8:16]", "{k: v[8:16] for k, v in x.items()}"),
        case("one row", "x.rows[3]", "{k: v[3] for k, v in x.items()}"),
        Case("attribute, typed", f"{count} fields", attribute, lambda: data),
    ]


def whole_case(operation: str, count: int) -> Case:
    ours, loop = WHOLE[operation]
    contenders = {
        OURS: statement(ours, partial(of, DeviceDict), "d", "d, e = x"),
        DICT: statement(loop, partial(of, dict), "d", "d, e = x"),
    }
    return Case(operation, f"{count} fields", contenders, lambda: pair(count, lambda i: (1 + i % 20, 16)), equal=close)


def cases() -> list[Case]:
    return [
        *container_cases(8),
        *container_cases(100),
        whole_case("lerp_", 8),
        *(whole_case(operation, 400) for operation in ("add_", "copy_", "zero_")),
    ]


if __name__ == "__main__":
    main(__doc__, cases)
