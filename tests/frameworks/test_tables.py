"""Where users come from: TensorDict, pandas and Arrow."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from checks import check_invariants

from tensordict_lite import DeviceDict, Vocabulary


class TestTensorDict:
    def test_there_and_back(self) -> None:
        tensordict = pytest.importorskip("tensordict")
        td = tensordict.TensorDict(
            {"x": torch.ones(2, 3), "n": tensordict.TensorDict({"y": torch.zeros(2)}, [2]), "s": "hi"}, batch_size=[2]
        )
        for given in (td, DeviceDict.from_tensordict(td).to_tensordict()):
            d = DeviceDict.from_tensordict(given)
            check_invariants(d)
            assert d["x"] is td["x"] and d["n", "y"] is td["n", "y"] and d.decode("s") == "hi"
        inside = DeviceDict.from_tensordict({"a": td})
        assert inside["a", "x"] is td["x"] and inside["a"].decode("s") == "hi"
        back = d.to_tensordict(batch_size=[])
        assert (
            back.batch_size == torch.Size([]) and back["n", "y"] is td["n", "y"] and back.device == torch.device("cpu")
        )
        assert DeviceDict({"x": torch.ones(4, 2), "y": torch.ones(4)}).to_tensordict().batch_size == torch.Size([4])
        assert DeviceDict({"x": torch.ones(4, 2), "y": 1}).to_tensordict().batch_size == torch.Size([])
        stacked = DeviceDict.from_tensordict(torch.stack([td, td]), device="meta")
        assert stacked["x"].shape == (2, 2, 3) and stacked.device == torch.device("meta")
        lazy = tensordict.LazyStackedTensorDict(td.select("x"), td.select("x"))
        assert DeviceDict.from_tensordict(lazy)["x"].shape == (2, 2, 3)
        with pytest.raises(TypeError, match=r"^expected a TensorDict or another mapping, got list$"):
            DeviceDict.from_tensordict([])  # type: ignore[arg-type]


class TestPandas:
    def test_columns(self) -> None:
        pd = pytest.importorskip("pandas")
        frame = pd.DataFrame(
            {
                "i": [1, 2],
                "f": [1.5, float("nan")],
                "b": [True, False],
                "s": ["x", "y"],
                "c": pd.Categorical(["u", "v"]),
                "n": pd.array([1, 2], dtype="Int64"),
            }
        )
        d = DeviceDict(frame, encoders={"c": Vocabulary(["u", "v"])})
        check_invariants(d)
        assert {key: t.dtype for key, t in d.items()} == {
            "i": torch.int64,
            "f": torch.float64,
            "b": torch.bool,
            "s": torch.uint8,
            "c": torch.int64,
            "n": torch.int64,
        }
        assert d.decode("s") == ["x", "y"] and d.decode("c") == ["u", "v"] and d["f"].isnan().tolist() == [False, True]
        d["i"] += 1
        assert frame["i"].tolist() in ([1, 2], [2, 3])  # shared where pandas hands out memory that may be written
        d["more"] = frame["f"]
        assert d["more"].dtype == torch.float64
        assert DeviceDict({"f": frame["f"]}, dtype=torch.float32)["f"].dtype == torch.float32

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda pd: {"s": ["x", None]}, "'s': item [1]: expected a str"),
            (lambda pd: {"n": pd.array([1, None], dtype="Int64")}, "'n': expected a tensor, "),
            (lambda pd: {"d": pd.to_datetime(["2020-01-01"])}, "'d': expected a tensor, "),
            (lambda pd: {0: [1]}, "keys are str, got 0 of type int; use '0'"),
        ],
    )
    def test_what_no_tensor_can_hold(self, make: Any, message: str) -> None:
        pd = pytest.importorskip("pandas")
        with pytest.raises(TypeError) as caught:
            DeviceDict(pd.DataFrame(make(pd)))
        assert str(caught.value).startswith(message) and ("fill missing values first" in str(caught.value)) == (
            message[1] in "sn"
        )


class TestArrow:
    def test_columns(self) -> None:
        pa = pytest.importorskip("pyarrow")
        table = pa.table(
            {
                "i": [1, 2],
                "f": [1.5, 2.5],
                "b": [True, False],
                "s": ["x", "y"],
                "c": pa.array(["u", "v"]).dictionary_encode(),
                "l": [[1, 2], [3, 4]],
            }
        )
        for given in (table, table.to_batches()[0], pa.concat_tables([table.slice(0, 1), table.slice(1)])):
            d = DeviceDict(given)
            check_invariants(d)
            assert (
                d["i"].tolist() == [1, 2]
                and d["f"].dtype == torch.float64
                and d["b"].tolist() == [True, False]
                and d["l"].tolist() == [[1, 2], [3, 4]]
            )
            assert d.decode("s") == ["x", "y"] and d.decode("c") == ["u", "v"]
            d["i"].zero_()  # Arrow's memory cannot be written, so it is not shared
            assert given.column(0).to_pylist() == [1, 2]
        with pytest.raises(ValueError, match=r"^the table has two columns 'a'; rename one$"):
            DeviceDict(pa.table([pa.array([1]), pa.array([2])], names=["a", "a"]))
        with pytest.raises(
            TypeError, match=r"^'a': expected a tensor, .*, got a list of NoneType, int; fill missing values first"
        ):
            DeviceDict(pa.table({"a": [1, None]}))
        assert np.array_equal(DeviceDict({"x": pa.array([1.0, 2.0])})["x"].numpy(), [1.0, 2.0])


def test_nothing_is_imported() -> None:
    program = (
        "import sys, torch, tensordict_lite as t\nd = t.DeviceDict({'x': [1], 's': 'a'}, objects='keep')\n"
        "d['o'] = object()\n"
        "for name in ('pandas', 'pyarrow', 'tensordict', 'transformers', 'datasets', 'safetensors', 'jaxtyping', "
        "'accelerate', 'lightning'): assert name not in sys.modules, name"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
