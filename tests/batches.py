"""A batch with a field of each kind, for the tests of rows and of joins."""

from __future__ import annotations

import torch

from tensordict_lite import DeviceDict, Utf8, Vocabulary


class Batch(DeviceDict, objects="keep", encoders={"s": Vocabulary(["a", "b", "c"]), "name": Utf8(), "file": Utf8()}):
    """At module level, as what is pickled must be."""


def batch(n: int = 6) -> Batch:
    return Batch(
        {
            "x": torch.arange(2.0 * n).reshape(n, 2),
            "s": ["a", "b", "c"] * (n // 3),
            "name": [f"n{i}" for i in range(n)],
            "n": {"id": torch.arange(n), "file": [f"f{i}" * (1 + i) for i in range(n)], "e": {}},
            "o": [None] * (n - 1) + [{1}],
            "meta": object,
        }
    )
