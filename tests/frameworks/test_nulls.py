"""Tables with missing values: `DeviceDict.from_arrow` and `DeviceDict.from_pandas`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from checks import check_invariants, fails

from tensordict_lite import DeviceDict, Ragged, Vocabulary

pa: Any = pytest.importorskip("pyarrow")
pd: Any = pytest.importorskip("pandas")


def table() -> Any:
    return pa.table(
        {
            "i": [1, None, 3],
            "f": pa.array([1.5, 2.5, None], pa.float32()),
            "b": [True, None, False],
            "s": ["a", None, "c"],
            "l": pa.array([[1, 2], None, [3]], pa.list_(pa.int32())),
            "v": pa.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], pa.list_(pa.float32(), 2)),
            "c": pa.array(["u", "v", "u"]).dictionary_encode(),
        }
    )


class TestArrow:
    @pytest.mark.parametrize("chunks", [1, 2])
    def test_masks(self, chunks: int) -> None:
        given = table() if chunks == 1 else pa.concat_tables([table().slice(0, 1), table().slice(1)])
        d = DeviceDict.from_arrow(given, nulls="mask", encoders={"c": Vocabulary(["u", "v"])})
        check_invariants(d)
        assert list(d) == ["i", "i_valid", "f", "f_valid", "b", "b_valid", "s", "s_valid", "l", "l_valid", "v", "c"]
        assert d["i"].tolist() == [1, 0, 3] and d["i"].dtype == torch.int64
        assert d["i_valid"].tolist() == [True, False, True]
        assert d["f"].tolist() == [1.5, 2.5, 0] and d["f"].dtype == torch.float32
        assert d["b"].tolist() == [True, False, False]
        assert d.decode("s") == ["a", "", "c"] and d.decode("c") == ["u", "v", "u"]
        assert isinstance(d["l"], Ragged) and d["l"].tolist() == [[1, 2], [], [3]]
        assert d["v"].tolist() == [[1, 2], [3, 4], [5, 6]] and d["l_valid"].tolist() == [True, False, True]
        assert [row["l"].tolist() for row in d.rows] == [[1, 2], [], [3]]
        assert [row.tolist() for row in d.rows[[2, 0]]["l"].unbind()] == [[3], [1, 2]]
        assert [row.tolist() for row in d.rows[1:]["l"].unbind()] == [[], [3]]

    def test_a_fill_value(self) -> None:
        d = DeviceDict.from_arrow(table().select(["i", "f", "b"]), nulls=1)
        assert d["i"].tolist() == [1, 1, 3] and d["f"].tolist() == [1.5, 2.5, 1]
        assert d["b"].tolist() == [True, True, False]
        d = DeviceDict.from_arrow(
            table().drop(["l", "f"]), nulls={"i": -1, "b": "mask", "s": "?", "v": "mask"}, dtype=torch.float64
        )
        assert d["i"].tolist() == [1, -1, 3] and d.decode("s") == ["a", "?", "c"]
        assert d["b_valid"].tolist() == [True, False, True]
        assert d["v_valid"].all() and d["v"].dtype == torch.float64, "a mask that is named is always there"

    def test_without_nulls_it_is_the_constructor(self) -> None:
        full = pa.table(
            {"i": [1, 2], "s": ["a", "b"], "l": [[1.5], [2.5, 3.5]], "e": pa.array([[], []], pa.list_(pa.int64()))}
        )
        d = DeviceDict.from_arrow(full, dtype=torch.float64)
        assert d.drop("l", "e") == DeviceDict(full.select(["i", "s"]), dtype=torch.float64)
        assert d["l"].values.dtype == torch.float64
        assert d["l"].tolist() == [[1.5], [2.5, 3.5]] and d["e"].tolist() == [[], []] and len(d.rows) == 2
        batch = DeviceDict.from_arrow(full.to_batches()[0], nulls="mask")
        assert list(batch) == list(full.schema.names) and len(batch.rows) == 2
        sliced = DeviceDict.from_arrow(full.slice(1))
        assert [row.tolist() for row in sliced["l"].unbind()] == [[2.5, 3.5]] and sliced["i"].tolist() == [2]

    @pytest.mark.parametrize(("columns", "nulls", "error", "message"), [
        (["i"], "error", ValueError,
         "column 'i': 1 of 3 values are null; give nulls=\"mask\" or a fill value, as nulls={'i': 0}"),
        (["s"], 0, TypeError, "column 's': nulls of string cannot become 0: "),
        (["b"], -1, TypeError, "column 'b': nulls of bool cannot become -1: expected True or False"),
        (["i"], {"q": 0}, ValueError, "nulls= names 'q', which is not a column; the columns are 'i'"),
        (["i"], None, TypeError,
         'nulls= takes "error", "mask", a fill value, or a mapping from columns to these, got None'),
        (["l"], 0, TypeError, "column 'l': nulls of list<"),
    ])  # fmt: skip
    def test_errors(self, columns: list[str], nulls: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error) as caught:
            DeviceDict.from_arrow(table().select(columns), nulls=nulls)
        assert str(caught.value).startswith(message)

    def test_more_errors(self) -> None:
        with pytest.raises(TypeError, match=r"^from_arrow takes a pyarrow.Table or RecordBatch, got list$"):
            DeviceDict.from_arrow([])
        with pytest.raises(
            ValueError, match=r"^column 'i': its mask would be 'i_valid', which is a column already; rename one$"
        ):
            DeviceDict.from_arrow(pa.table({"i": [None, 1], "i_valid": [1, 2]}), nulls="mask")
        with pytest.raises(ValueError, match=r"^column 'l': 1 nulls inside of lists; fill them in Arrow first$"):
            DeviceDict.from_arrow(pa.table({"l": [[1, None], [2]]}), nulls="mask")


FILLS: list[tuple[str, str, Any, Any]] = [  # the dtype in Arrow and in pandas, the fill value, what it becomes
    ("int8", "Int8", np.int64(-3), -3),
    ("int8", "Int8", True, 1),
    ("int64", "Int64", 2.0, 2),
    ("int64", "Int64", (1 << 53) + 1, (1 << 53) + 1),
    ("uint64", "UInt64", (1 << 64) - 1, (1 << 64) - 1),
    ("bool_", "boolean", 0, False),
    ("bool_", "boolean", np.bool_(True), True),
    ("float32", "Float32", 1 << 70, 2.0**70),
    ("float64", "Float64", np.float32(0.5), 0.5),
    ("float64", "Float64", -np.inf, -np.inf),
    ("float16", "float16", True, 1.0),
    ("float32", "float32", 0, 0.0),
    ("string", "string", np.str_("q"), "q"),
    ("int64", "Int64", 1.5, "an int from -9223372036854775808 to 9223372036854775807"),
    ("int64", "Int64", np.nan, "an int from -9223372036854775808 to 9223372036854775807"),
    ("int8", "Int8", -129, "an int from -128 to 127"),
    ("uint8", "UInt8", 300, "an int from 0 to 255"),
    ("uint64", "UInt64", 1 << 70, "an int from 0 to 18446744073709551615"),
    ("bool_", "boolean", 2, "True or False"),
    ("bool_", "boolean", np.nan, "True or False"),
    ("float32", "Float32", 1e300, "a number up to 3.4028e+38"),
    ("float16", "float16", 1 << 70, "a number up to 65504"),
    ("float64", "float64", "q", "a number"),
    ("string", "string", 0, "a string"),
]


@pytest.mark.parametrize(("arrow", "pandas", "fill", "expected"), FILLS)
def test_a_fill_value_is_stored_as_given_or_refused(arrow: str, pandas: str, fill: Any, expected: Any) -> None:
    """The column holds the number itself, or a rounded float. It was 1 for 1.5, and True for 2."""
    one = "a" if arrow == "string" else 1
    column = pa.array([None if arrow == "bool_" else one, None], getattr(pa, arrow)())
    series = pd.Series([one, None], dtype=pandas)
    for d in (
        lambda: DeviceDict.from_arrow(pa.table({"c": column}), nulls=fill),
        lambda: DeviceDict.from_pandas(pd.DataFrame({"c": series}), nulls=fill),
    ):
        if isinstance(expected, str) and expected != fill:
            with pytest.raises(TypeError) as caught:
                d()
            message = str(caught.value)
            assert message.startswith("column 'c': ") and message.endswith(f"become {fill!r}: expected {expected}")
        else:
            made = d()
            got = made.decode("c") if arrow == "string" else made["c"].tolist()
            assert got[1] == expected and type(got[1]) is type(expected)
            assert arrow == "string" or made["c"].dtype is getattr(torch, arrow.strip("_"))


class TestPandas:
    def frame(self) -> Any:
        return pd.DataFrame({
            "i": pd.array([1, None], dtype="Int64"), "f": [1.0, np.nan], "s": ["x", None],
            "o": pd.Series([None, "y"], dtype=object), "c": pd.Categorical(["u", None]),
            "b": pd.array([True, None], dtype="boolean"),
        })  # fmt: skip

    def test_masks(self) -> None:
        d = DeviceDict.from_pandas(self.frame(), nulls="mask")
        check_invariants(d)
        assert d["i"].tolist() == [1, 0] and d["f"].tolist() == [1, 0] and d["b"].tolist() == [True, False]
        assert d.decode("s") == ["x", ""] and d.decode("o") == ["", "y"] and d.decode("c") == ["u", ""]
        assert all(d[f"{key}_valid"].tolist() == [True, False] for key in "ifscb")
        assert d["o_valid"].tolist() == [False, True]

    def test_fill_values(self) -> None:
        frame = self.frame()
        d = DeviceDict.from_pandas(frame, nulls={"i": 7, "f": 0.5, "s": "?", "o": "?", "c": "?", "b": True})
        assert d["i"].tolist() == [1, 7] and d["f"].tolist() == [1, 0.5] and d["b"].tolist() == [True, True]
        assert d.decode("s") == ["x", "?"] and d.decode("o") == ["?", "y"] and d.decode("c") == ["u", "?"]
        assert frame["f"].isna().sum() == 1, "the frame is unchanged"

    def test_nan_is_a_number_unless_asked(self) -> None:
        assert DeviceDict.from_pandas(self.frame()[["f"]])["f"].isnan().tolist() == [False, True]
        with pytest.raises(ValueError, match=r"^column 'i': 1 of 2 values are null; give nulls="):
            DeviceDict.from_pandas(self.frame())
        with pytest.raises(TypeError, match=r"^column 's': missing values of \w+ cannot become 0: expected a string$"):
            DeviceDict.from_pandas(self.frame()[["s"]], nulls=0)
        fails(TypeError, r"^from_pandas takes a pandas.DataFrame, got dict$", lambda: DeviceDict.from_pandas({}))
        with pytest.raises(ValueError, match=r"^the table has two columns 'a'; rename one$"):
            DeviceDict.from_pandas(pd.DataFrame([[1, 2]], columns=["a", "a"]))
