"""Arrays of other libraries: JAX and Polars."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checks import check_invariants

from tensordict_lite import DeviceDict, collate


def test_arrays_of_jax_are_shared() -> None:
    jax: Any = pytest.importorskip("jax")
    array = jax.numpy.arange(4.0)
    d = DeviceDict({"x": array, "half": jax.numpy.ones(2, jax.numpy.bfloat16), "mask": array > 1})
    check_invariants(d)
    assert d["x"].data_ptr() == torch.from_dlpack(array).data_ptr()
    assert (d["half"].dtype, d["mask"].tolist()) == (torch.bfloat16, [False, False, True, True])
    assert collate([{"x": array}, {"x": array}])["x"].shape == (2, 4)
    assert collate([{"x": array[:1]}, {"x": array}], pad={"x": 0})["x"].tolist() == [[0, 0, 0, 0], [0, 1, 2, 3]]
    assert jax.numpy.from_dlpack(d["x"]).tolist() == [0, 1, 2, 3]
    with pytest.raises(TypeError, match=r"^'key': expected .*, got a PRNGKeyArray; pass numpy\.asarray\(value\), "):
        DeviceDict({"key": jax.random.key(0)})


def test_columns_of_polars() -> None:
    polars: Any = pytest.importorskip("polars")
    frame = polars.DataFrame({"x": [0.5, 1.5], "i": [1, 2], "s": ["a", "b"], "v": [[1, 2], [3, 4]]})
    d = DeviceDict(frame.to_dict())
    check_invariants(d)
    assert (d["x"].dtype, d["i"].dtype) == (torch.float64, torch.int64)
    assert d.decode("s") == ["a", "b"] and d["v"].tolist() == [[1, 2], [3, 4]]
    for column in ([1, None], ["a", None]):
        with pytest.raises(TypeError, match=r"^'x'.* got a.* NoneType.*; fill missing values first"):
            DeviceDict({"x": polars.Series(column)})
