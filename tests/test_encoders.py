"""Strings in and out: the four encoders, hooks, nested lists, JSON, pickle, and where an encoder goes."""

from __future__ import annotations

import json
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checks import check_invariants, fails
from hypothesis import given
from hypothesis import strategies as st
from ranks import on_ranks

from tensordict_lite import (
    DeviceDict,
    Hashing,
    JoinedRows,
    StringEncoder,
    Tokenizer,
    Utf8,
    Vocabulary,
    cat,
    collate,
    distributed,
    encoder_from_json,
    encoder_to_json,
    load,
    register_encoder,
    stack,
)
from tensordict_lite.tables import RowWriter

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)


class Tokens(Vocabulary):
    """At module level, as what is pickled must be."""


class Copies(DeviceDict[Any], encoders={"s": Vocabulary(["c"])}):
    """A copy of another dict keeps the encoders of that dict."""


class Words:
    """A stand-in with the two methods of a Hugging Face tokenizer that are used; picklable, compared by value."""

    def __init__(self, words: str) -> None:
        self.words = words.split()

    def __call__(self, strings: list[str], return_tensors: str, padding: bool | str, **options: Any) -> Any:
        assert return_tensors == "pt" and padding and isinstance(strings, list)
        ids = [[self.words.index(word) + 1 for word in string.split()] for string in strings]
        width = max(map(len, ids))
        padded = torch.tensor([row + [0] * (width - len(row)) for row in ids])
        return {"input_ids": padded, "attention_mask": (padded > 0).long()}

    def batch_decode(self, ids: torch.Tensor, skip_special_tokens: bool) -> list[str]:
        return [" ".join(self.words[i - 1] for i in row if i) for row in ids.tolist()]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Words) and self.words == other.words

    __hash__ = None  # type: ignore[assignment]


ENCODERS: list[Any] = [
    Utf8(),
    Utf8(40),
    Vocabulary(["ba", "ab", "c"]),
    Vocabulary(["c", "ab", "<unk>", "ba"], unknown="<unk>"),
    Hashing(8, 3),
]
ONE_WAY = {Hashing}
"""The encoders that cannot decode."""
STRINGS = ["ab", "c", "ab", "ba"]
"""Strings that every encoder in `ENCODERS` takes. Backwards, and in another order, they are others."""


class TestRoundTrips:
    @given(st.lists(TEXT, max_size=6))
    def test_utf8_is_exact(self, strings: list[str]) -> None:
        codes = Utf8().encode(strings)
        assert codes.dtype == torch.uint8 and codes.shape[0] == len(strings)
        assert Utf8().decode(codes) == strings
        widest = max((len(s.encode()) for s in strings), default=0)
        assert codes.shape[1] == widest
        fixed = Utf8(32).encode(strings)
        assert fixed.shape == (len(strings), 32) and Utf8().decode(fixed) == strings

    @given(st.lists(TEXT, min_size=1, max_size=6))
    def test_vocabulary_is_exact(self, strings: list[str]) -> None:
        vocabulary = Vocabulary.fit(strings)
        assert vocabulary.decode(vocabulary.encode(strings)) == strings
        assert vocabulary == Vocabulary.fit(reversed(strings)) and list(vocabulary.tokens) == sorted(set(strings))

    @given(st.lists(st.lists(TEXT, min_size=2, max_size=2), min_size=1, max_size=3), st.sampled_from(["cpu", "sim"]))
    def test_nested_lists_keep_their_shape(self, strings: list[list[str]], device: str) -> None:
        flat = [s for row in strings for s in row]
        d = DeviceDict({"u": strings, "v": strings}, encoders={"v": Vocabulary.fit(flat)}, device=device)
        check_invariants(d)
        assert d["u"].shape[:2] == d["v"].shape == (len(strings), 2)
        assert d.decode("u") == strings and d.decode("v") == strings

    @pytest.mark.parametrize("value", ["cat", np.str_("cat"), np.array("cat"), np.array("cat", dtype=object)])
    def test_one_string_has_no_leading_dimension(self, value: Any) -> None:
        d = DeviceDict(
            {"u": value, "v": value, "t": value}, encoders={"v": Vocabulary(["cat"]), "t": Tokenizer(Words("cat"))}
        )
        assert d["u"].shape == (3,) and d["v"].shape == () and d["t", "input_ids"].shape == (1,)
        assert d.decode("u") == d.decode("v") == d.decode("t") == "cat"

    @pytest.mark.parametrize(
        "value",
        [["a", "b"], ("a", "b"), np.array(["a", "b"]), np.array(["a", "b"], dtype=object), [np.str_("a"), "b"],
         *([np.array(["a", "b"], dtype=np.dtypes.StringDType())] if hasattr(np.dtypes, "StringDType") else [])],
    )  # fmt: skip
    def test_every_form_of_a_list_of_strings(self, value: Any) -> None:
        assert DeviceDict({"s": value}).decode("s") == ["a", "b"]

    def test_a_field_of_codes_decodes_whoever_made_them(self, device: torch.device) -> None:
        d = DeviceDict({"s": ["a"]}, encoders={"s": Vocabulary(["a", "b"])}, device=device)
        d["s"] = torch.tensor([[1, 0], [1, 1]], device=device, dtype=torch.int32)
        assert d.decode("s") == [["b", "a"], ["b", "b"]]

    def test_empty_strings_and_empty_lists(self) -> None:
        d = DeviceDict({"e": ["", ""], "l": [], "v": [], "p": []}, encoders={"l": Utf8(4), "v": Vocabulary(["a"])})
        assert d["e"].shape == (2, 0) and d.decode("e") == ["", ""]
        assert d["l"].shape == (0, 4) and d.decode("l") == [] and d["v"].dtype == torch.int64 and d.decode("v") == []
        assert DeviceDict({"e": ["", ""]}, encoders=Utf8(0)).decode("e") == ["", ""]
        assert d["p"].dtype == torch.float32, "an empty list at a key without an encoder is numbers, as in torch"

    def test_strings_without_padding_may_start_anywhere(self) -> None:
        codes, lengths = Utf8().encode_ragged(["ab", "é", ""])
        ends = torch.tensor([0, *lengths.cumsum(0).tolist()])
        assert Utf8().decode_ragged(codes, ends) == ["ab", "é", ""]
        assert Utf8().decode_ragged(codes, ends[1:]) == ["é", ""]
        assert Utf8().decode_ragged(codes.new_tensor([97, 0, 0, 98]), torch.tensor([0, 3, 4])) == ["a", "b"], "padded"


class TestErrors:
    @pytest.mark.parametrize(("encoder", "value", "error", "message"), [
        (Utf8(), "a\0b", ValueError, "'n.s': 'a\\x00b' holds a NUL character, which UTF-8 codes use as padding"),
        (Utf8(), "\ud800", ValueError, "'n.s': '\\ud800' is not valid Unicode text (a lone surrogate)"),
        (Utf8(3), ["é", "éé"], ValueError,
         "'n.s': 'éé' is 4 bytes in UTF-8, over max_length=3; raise max_length, strings are never cut"),
        (Vocabulary(["a", "b"]), ["a", "c"], ValueError,
         "'n.s': 'c' is not among the 2 tokens of Vocabulary(['a', 'b']); add it, or give unknown="),
        (Utf8(), ["a", None], TypeError,
         "'n.s': item [1]: expected a str as for the others, got a NoneType; fill missing values first"),
        (Utf8(), ["a", float("nan")], TypeError,
         "'n.s': item [1]: expected a str as for the others, got a float; fill missing values first"),
        (Utf8(), [None, "a"], TypeError,
         "'n.s': item [0]: expected a str as for the others, got a NoneType; fill missing values first"),
        (Utf8(), ["a", 3], TypeError, "'n.s': item [1]: expected a str as for the others, got an int"),
        (Utf8(), [1.0, 2.0, "n/a"], TypeError,
         "'n.s': item [2]: expected a number as for the others, got the str 'n/a'"),
        (Utf8(), [[1, 2], ["-", 3, 4]], TypeError,
         "'n.s': item [1][0]: expected a number as for the others, got the str '-'"),
        (Utf8(), np.array(["a", None], dtype=object), TypeError,
         "'n.s': item [1]: expected a str as for the others, got a NoneType"),
        (Utf8(), [["a", "b"], ["c"]], ValueError,
         "'n.s': item [1]: expected a length of 2, got 1; nested lists must be rectangular"),
        (Utf8(), [["a"], "b"], TypeError, "'n.s': item [1]: expected a list of 1, got a str"),
        (lambda strings: [1], "a", TypeError,
         "encode: expected a Tensor or a mapping of tensors, got a list; wrap a Hugging Face tokenizer in Tokenizer"),
        (lambda strings: torch.zeros(3), ["a", "b"], TypeError,
         "encode: expected a first dimension of 2, that of the strings, got shape [3]"),
        (lambda strings: torch.tensor(2), ["a", "b"], TypeError,
         "encode: expected a first dimension of 2, that of the strings, got shape []"),
    ])  # fmt: skip
    def test_encoding(self, encoder: Any, value: Any, error: type[Exception], message: str) -> None:
        d = DeviceDict({"n": {"x": 1}}, encoders={"s": encoder})
        with pytest.raises(error, match=re.escape(message)):
            d["n", "s"] = value
        assert list(d["n"]) == ["x"]

    @pytest.mark.parametrize(("key", "error", "message"), [
        ("v", ValueError, "'v': code -1 is outside Vocabulary(['a', 'b']), whose codes are 0 to 1"),
        ("h", TypeError, "'h': Hashing(buckets=4, seed=0) is one way and cannot be decoded"),
        ("f", TypeError, "'f': <lambda> only encodes; give an object with encode and decode to get strings back"),
        ("x", TypeError,
         "'x': Utf8() decodes uint8 codes, got float32; 'x' has no encoder of its own, give one as encoders="),
        ("o", TypeError, "'o': expected encoded strings, got a NoneType"),
        ("nope", KeyError, "'nope' is not in this DeviceDict"),
    ])  # fmt: skip
    def test_decoding(self, key: str, error: type[Exception], message: str) -> None:
        d = DeviceDict(
            {"v": ["a"], "h": ["a"], "f": ["a"], "x": torch.tensor([1.5]), "o": None},
            objects="keep",
            encoders={"v": Vocabulary(["a", "b"]), "h": Hashing(4), "f": lambda strings: torch.zeros(len(strings))},
        )
        d["v"] = torch.tensor([0, -1])
        fails(error, re.escape(message), lambda: d.decode(key))

    def test_decoding_floats(self) -> None:
        with pytest.raises(TypeError, match="decodes integer codes, got float32"):
            DeviceDict({"v": 1.0}, encoders={"v": Vocabulary(["a", "b"])}).decode("v")

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: Utf8(-1), "max_length is a number of bytes, 0 or more, or None; got -1"),
            (lambda: Utf8("3"), "got '3'"),  # type: ignore[arg-type]
            (
                lambda: Vocabulary(["a", "b", "a"]),
                "tokens must be distinct, 'a' is repeated; Vocabulary.fit takes repeated",
            ),
            (lambda: Vocabulary(["a"], unknown="b"), "unknown='b' must be one of the tokens"),
            (lambda: Hashing(0), "buckets is a whole number from 1 to 2**63, got 0"),
            (lambda: Hashing(4, -1), "seed is a whole number from 0 to 2**64 - 1, got -1"),
            (lambda: Hashing(4, 2**64), "seed is a whole number from 0 to 2**64 - 1, got 18446744073709551616"),
        ],
    )
    def test_making(self, make: Any, message: str) -> None:
        fails(ValueError, re.escape(message), make)

    @pytest.mark.parametrize("kind", [set, frozenset])
    def test_a_set_has_no_order(self, kind: Any) -> None:
        """The hash of a string differs between processes, so the codes would."""
        with pytest.raises(TypeError) as caught:
            Vocabulary(kind(["cat", "dog"]))
        assert str(caught.value) == (
            f"tokens must be in order, got a {kind.__name__}, whose order differs between processes; "
            "Vocabulary.fit sorts the tokens"
        )
        assert Vocabulary.fit(kind(["dog", "cat"])).tokens == ("cat", "dog") == Vocabulary({"cat": 0, "dog": 1}).tokens

    def test_tokens_are_strings(self) -> None:
        fails(TypeError, "tokens are str, got int: 3", lambda: Vocabulary(["a", 3]))  # type: ignore[list-item]
        assert "a" in Vocabulary(["a"]) and "b" not in Vocabulary(["a"])
        fails(TypeError, "expected a Hugging Face tokenizer, got int", lambda: Tokenizer(3))
        fails(TypeError, "return_tensors is always 'pt' here", lambda: Tokenizer(Words("a"), return_tensors="np"))

    @pytest.mark.parametrize("missing", [None, float("nan")])
    def test_missing_tokens(self, missing: Any) -> None:
        fails(TypeError, r"tokens are str, got .*; fill missing values first", lambda: Vocabulary.fit(["a", missing]))

    def test_a_key_error_in_an_encoder_names_the_field(self) -> None:
        with pytest.raises(ValueError, match=r"^'s': 'q'$"):
            DeviceDict({"s": "q"}, encoders={"s": lambda strings: torch.tensor([{"a": 1}[s] for s in strings])})

    @pytest.mark.parametrize(
        ("key", "message"), [("e", "not codes"), ("n", "not codes"), ("t", "decodes a tensor of codes, got dict")]
    )
    def test_decoding_a_nested_dict_that_holds_no_codes(self, key: str, message: str) -> None:
        d = DeviceDict({"e": {}, "n": {"m": {"x": 1}}, "t": {"x": torch.zeros(2, dtype=torch.uint8)}})
        fails(TypeError, f"^'{key}': .*{message}", lambda: d.decode(key))

    def test_a_class_is_not_an_encoder(self) -> None:
        with pytest.raises(TypeError, match=r"an encoder is an instance, got the class Utf8; call it: Utf8\(\.\.\.\)"):
            DeviceDict(encoders=Utf8)
        fails(TypeError, r"got the one string 'abc'; for its characters use list\(\)", lambda: Vocabulary("abc"))


def strings_of(d: Any) -> list[Any]:
    """The strings of the field; the codes of each string if its encoder is one way."""
    if type(d.encoders["s"]) not in ONE_WAY:
        return d.decode("s")
    fails(TypeError, r"^'s': .* is one way and cannot be decoded", lambda: d.decode("s"))
    return d["s"].tolist()


def batch_of(encoder: Any, strings: list[Any], **options: Any) -> Any:
    """A batch with a row for each item. An item is a string, or a list of strings with ``ragged`` or ``pad``."""
    if options:
        return collate([{"s": one} for one in strings], encoders={"s": encoder}, **options)
    return DeviceDict({"s": strings}, encoders={"s": encoder})


def through_a_table(encoder: Any, strings: list[Any], folder: Path, **options: Any) -> Any:
    """Two writes, read back. The first one has the longest string, which decides the width."""
    like = batch_of(encoder, strings, **options)
    with RowWriter(folder, like=like) as writer:
        writer.write(like.rows[:2])
        writer.write({"s": strings[2:]})
    return load(folder)


LISTS = [["ab"], [], ["c", "ba"], ["ab"]]
EVERY: dict[str, Callable[[Any, Path], Any]] = {
    "insert": lambda encoder, _: batch_of(encoder, STRINGS),
    "one by one": lambda encoder, _: stack([batch_of(encoder, [one]).rows[0] for one in STRINGS]),
    "nested lists": lambda encoder, _: batch_of(encoder, [STRINGS[:2], STRINGS[2:]]).rows.flatten(),
    "cat": lambda encoder, _: cat([batch_of(encoder, STRINGS[i : i + 1]) for i in range(4)]),
    "collate": lambda encoder, _: collate([{"s": one} for one in STRINGS], encoders={"s": encoder}),
    "joined": lambda encoder, _: JoinedRows([batch_of(encoder, STRINGS[:2]), batch_of(encoder, STRINGS[2:])])[:],
    "write rows": lambda encoder, _: written(batch_of(encoder, ["ba", *STRINGS[1:]])),
    "sort": lambda encoder, _: batch_of(encoder, STRINGS).rows.sort_by("s"),
    "pickle": lambda encoder, _: pickle.loads(pickle.dumps(batch_of(encoder, STRINGS))),
    "table": lambda encoder, folder: through_a_table(encoder, STRINGS, folder),
    "ragged": lambda encoder, _: batch_of(encoder, LISTS, ragged=["s"]),
    "ragged cat": lambda encoder, _: cat([batch_of(encoder, [one], ragged=["s"]) for one in LISTS]),
    "ragged rows": lambda encoder, _: batch_of(encoder, LISTS, ragged=["s"]).rows[[0, 1, 2, 3]],
    "ragged table": lambda encoder, folder: through_a_table(encoder, LISTS, folder, ragged=["s"]),
    "pad": lambda encoder, _: batch_of(encoder, LISTS, pad={"s": 0}),
    "unpadded": lambda encoder, _: batch_of(encoder, STRINGS, ragged=["s"]),
    "unpadded rows": lambda encoder, _: batch_of(encoder, STRINGS, ragged=["s"]).rows[1:].rows[[0, 1, 2]],
    "unpadded table": lambda encoder, folder: through_a_table(encoder, STRINGS, folder, ragged=["s"]),
}
"""What each encoder goes through, and comes back from with the strings that went in."""


def written(d: Any) -> Any:
    d.rows[:1] = {"s": STRINGS[:1]}
    return d


def expected_strings(encoder: Any, way: str) -> list[Any]:
    """The strings after a way of `EVERY`; the codes of each string if the encoder is one way."""

    def one(string: str) -> Any:
        return encoder.encode([string]).tolist()[0] if type(encoder) in ONE_WAY else string

    if way == "sort":
        return [one(string) for string in sorted(STRINGS, key=lambda string: encoder.encode([string]).tolist())]
    given: list[Any] = LISTS if way.startswith(("ragged", "pad")) else STRINGS[way == "unpadded rows" :]
    return [one(item) if isinstance(item, str) else list(map(one, item)) for item in given]


def every_way(folder: Path) -> Iterator[Any]:
    """Each encoder on each of its ways. Only strings with a dimension of codes are stored without padding."""
    for encoder in ENCODERS:
        for way, do in EVERY.items():
            if encoder.code_ndim or not way.startswith("unpadded"):
                yield encoder, way, do(encoder, folder / f"{encoder!r}-{way}")


def all_ways_on_ranks(rank: int, folder: Path) -> None:
    for encoder, way, d in every_way(folder / str(rank)):
        for received in (distributed.broadcast(d if rank == 0 else None), distributed.all_gather(d)[1 - rank]):
            assert seen(received, way) == expected_strings(encoder, way), (encoder, way)


def seen(d: Any, way: str) -> list[Any]:
    """The strings that a way of `EVERY` gives, without what ``pad`` put behind them."""
    rows = strings_of(d)
    return [row[: len(given)] for row, given in zip(rows, LISTS, strict=True)] if way == "pad" else rows


class TestEveryEncoder:
    def test_the_strings_come_back(self, tmp_path: Path) -> None:
        for encoder, way, d in every_way(tmp_path):
            assert seen(d, way) == expected_strings(encoder, way), (encoder, way)
            assert d.encoders["s"] == encoder

    @pytest.mark.ranks
    def test_the_strings_come_back_from_another_rank(self, tmp_path: Path) -> None:
        on_ranks(all_ways_on_ranks, tmp_path)


class TestEncoderValues:
    @pytest.mark.parametrize("encoder", ENCODERS, ids=repr)
    def test_equality_pickle_and_json(self, encoder: Any) -> None:
        assert isinstance(encoder, StringEncoder)
        again = pickle.loads(pickle.dumps(encoder))
        data = json.loads(json.dumps(encoder_to_json(encoder)))
        rebuilt = encoder_from_json(data)
        assert again == encoder == rebuilt and hash(again) == hash(encoder) == hash(rebuilt)
        assert [other == encoder for other in ENCODERS].count(True) == 1
        assert type(rebuilt) is type(encoder) and repr(rebuilt) == repr(encoder)
        assert "." not in data["name"], "a name, not an import path"
        with pytest.raises((AttributeError, TypeError)):
            encoder.buckets = 3  # pyright: ignore[reportAttributeAccessIssue]

    def test_an_unknown_name_is_shown(self) -> None:
        with pytest.raises(ValueError, match=r"no encoder is registered as 'os\.system'; known are .*hashing, .*utf8"):
            encoder_from_json({"name": "os.system"})
        fails(ValueError, "registered as None", lambda: encoder_from_json({}))
        with pytest.raises(TypeError, match="has no JSON form; register its class with register_encoder"):
            encoder_to_json(lambda strings: torch.zeros(0))  # type: ignore[arg-type]

    def test_a_name_is_taken_once(self) -> None:
        class Other(StringEncoder):
            name = "utf8"
            to_json = lambda self: {}  # noqa: E731

        fails(ValueError, "the encoder name 'utf8' is taken by Utf8; choose another", lambda: register_encoder(Other))
        assert register_encoder(Utf8) is Utf8

    def test_a_long_vocabulary_has_a_short_repr(self) -> None:
        assert repr(Vocabulary(map(str, range(50_000)))) == "Vocabulary(<50000 tokens>)"

    def test_hashing_is_the_same_in_every_process(self) -> None:
        codes = Hashing(2**40, seed=7).encode(["cat", "é", ""]).tolist()
        # Written down, so that no change of process, version or platform goes unnoticed.
        assert codes == [746626834362, 954148142985, 548619470093]
        assert Hashing(1000).encode(["cat", "dog"]).tolist() == [939, 465]
        assert codes != Hashing(2**40, seed=8).encode(["cat", "é", ""]).tolist()

    def test_hashing_spreads_evenly(self) -> None:
        counts = torch.bincount(Hashing(16).encode([str(i) for i in range(16_000)]), minlength=16)
        assert counts.min() > 850 and counts.max() < 1150  # mean 1000, standard deviation 31

    def test_a_subclass_of_an_encoder_is_pickled_as_itself(self) -> None:
        assert type(pickle.loads(pickle.dumps(Tokens(["a"])))) is Tokens

    @pytest.mark.parametrize("data", [
        None,
        "utf8",
        {"name": "vocabulary"},
        {"name": "vocabulary", "tokens": None},
        {"name": "vocabulary", "tokens": "abc"},
        {"name": "utf8", "max_length": 3, "more": 1},
        {"name": "hashing", "buckets": "4"},
        {"name": "vocabulary", "tokens": ["a"], "unknown": ["b"]},
    ])  # fmt: skip
    def test_json_of_the_wrong_form_is_refused(self, data: Any) -> None:
        fails(ValueError, r"the JSON form of|buckets is a whole number", lambda: encoder_from_json(data))

    def test_an_encoder_can_be_registered_again_by_the_same_cell(self) -> None:
        for _ in range(2):

            @register_encoder
            class Cell(StringEncoder):
                name = "cell"
                to_json = lambda self: {}  # noqa: E731

            assert type(encoder_from_json({"name": "cell"})) is Cell


class Lengths:
    """An object with the two methods, of no base class."""

    def encode(self, strings: list[str]) -> torch.Tensor:
        return torch.tensor([len(string) for string in strings])

    def decode(self, codes: torch.Tensor) -> list[str]:
        return ["?" * length for length in codes.tolist()]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lengths)

    __hash__ = None  # type: ignore[assignment]


class TestBaseClass:
    def test_every_attribute_has_a_default(self) -> None:
        class Mine(StringEncoder):
            pass

        mine: Any = Mine()
        assert (mine.name, mine.code_ndim, mine.padding, mine.code_dtype, mine.is_data, mine.runs_code) == (
            "", None, None, None, False, False,
        )  # fmt: skip
        assert mine.encode_ragged(["a"]) is None and mine.decode_ragged(torch.zeros(0), torch.zeros(1)) is None
        fails(NotImplementedError, r"^the encoder class Mine has no encode$", lambda: mine.encode(["a"]))
        with pytest.raises(
            TypeError, match=r"only encodes; give an object with encode and decode to get strings back$"
        ):
            mine.decode(torch.zeros(1))
        fails(TypeError, r"has no JSON form; register its class with register_encoder$", lambda: encoder_to_json(mine))

    def test_the_built_in_encoders_declare_nothing_else(self) -> None:
        """So that `StringEncoder` documents everything that the package asks of an encoder."""
        of_its_own = {"max_length", "tokens", "unknown", "buckets", "seed", "fit", "tokenizer", "call"}
        for encoder in (*ENCODERS, Tokenizer(Words("a"))):
            public = {name for name in dir(encoder) if not name.startswith("_")}
            assert public - set(dir(StringEncoder)) <= of_its_own

    @pytest.mark.parametrize("given", [Lengths(), lambda strings: torch.tensor([len(s) for s in strings])])
    def test_other_objects_are_wrapped_once(self, given: Any) -> None:
        d = DeviceDict({"s": ["a", "four"]}, encoders={"s": given})
        assert d["s"].tolist() == [1, 4] and d.encoders["s"] is given
        wrapped = d._policy.encoders["s"]
        assert isinstance(wrapped, StringEncoder) and repr(wrapped) in (repr(given), "<lambda>")
        again = DeviceDict(d, encoders=dict(d.encoders))
        assert again._policy == d._policy and again.encoders["s"] is given
        assert DeviceDict({"s": "four"}, encoders=given)["s"].item() == 4
        if isinstance(given, Lengths):
            assert d.decode("s") == ["?", "????"]
            copied = pickle.loads(pickle.dumps(d))
            assert copied.encoders["s"] == given and copied.decode("s") == ["?", "????"]


def test_one_object_is_one_encoder_whatever_its_equality_says() -> None:
    class NeverEqual(Lengths):
        def __eq__(self, other: object) -> bool:
            return False

        __hash__ = None  # type: ignore[assignment]

    encoder = NeverEqual()
    d, other = (DeviceDict({"s": ["a", "b"]}, encoders={"s": encoder}) for _ in range(2))
    d.rows[0] = other.rows[1]
    for joined in (cat([d, other]), collate([d.rows[0], other.rows[0]]), DeviceDict(d, encoders={"s": encoder})):
        assert joined.encoders["s"] is encoder


class TestTokenizer:
    def test_gives_a_nested_dict(self, device: torch.device) -> None:
        tokenizer = Tokenizer(Words("a cat sat"))
        d = DeviceDict({"text": [["a cat", "cat"], ["sat", "a"]]}, encoders={"text": tokenizer}, device=device)
        check_invariants(d)
        assert d["text", "input_ids"].shape == (2, 2, 2) and list(d["text"]) == ["input_ids", "attention_mask"]
        assert d.decode("text") == [["a cat", "cat"], ["sat", "a"]]
        assert d["text"].device == device

    def test_is_a_value(self) -> None:
        a, b = Tokenizer(Words("a b"), max_length=3), Tokenizer(Words("a b"), max_length=3)
        assert a == b and hash(a) == hash(b) and a != Tokenizer(Words("a b"))
        assert a != Tokenizer(Words("a"), max_length=3)
        assert pickle.loads(pickle.dumps(a)) == a and a != 3
        with pytest.raises(AttributeError, match="immutable"):
            a.call = {}
        fails(TypeError, "Words has no save_pretrained, so it has no JSON form", lambda: encoder_to_json(a))


class TestHuggingFace:
    """With the real library, where it is installed."""

    @pytest.fixture
    def tokenizer(self) -> Any:
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        tokenizers = pytest.importorskip("tokenizers")
        words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[SEP]", "a", "cat", "dog", "."])}
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        return transformers.PreTrainedTokenizerFast(
            tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", sep_token="[SEP]", padding_side="left",
            clean_up_tokenization_spaces=True, model_max_length=8, chat_template="{{ messages }}",
        )  # fmt: skip

    def test_encodes_and_decodes(self, tokenizer: Any) -> None:
        d = DeviceDict({"t": ["a cat.", "dog"]}, encoders={"t": Tokenizer(tokenizer, truncation=True)})
        assert d["t", "input_ids"].shape == (2, 3) and d["t", "attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
        assert d.decode("t") == ["a cat.", "dog"]
        again = pickle.loads(pickle.dumps(d))
        assert again == d and again.decode("t") == ["a cat.", "dog"] and again.encoders == d.encoders

    def test_json_holds_all_of_it(self, tokenizer: Any) -> None:
        encoder = Tokenizer(tokenizer, max_length=5, truncation=True)
        before = json.dumps(encoder_to_json(encoder))
        encoder.encode(["a cat", "dog"])
        assert json.dumps(encoder_to_json(encoder)) == before, "use does not change what it is"
        again = encoder_from_json(json.loads(before))
        assert again == encoder and again.tokenizer is not tokenizer  # pyright: ignore[reportAttributeAccessIssue]
        for name in (
            "padding_side", "model_max_length", "chat_template", "all_special_tokens", "clean_up_tokenization_spaces",
        ):  # fmt: skip
            assert getattr(again.tokenizer, name) == getattr(tokenizer, name), name  # pyright: ignore[reportAttributeAccessIssue]
        assert (
            again.encode(["a cat .", "dog"])["input_ids"].tolist()  # pyright: ignore[reportArgumentType]
            == encoder.encode(["a cat .", "dog"])["input_ids"].tolist()
        )
        assert again != Tokenizer(tokenizer)
        assert again.decode(again.encode(["cat ."])) == encoder.decode(encoder.encode(["cat ."]))

    def test_a_file_in_a_folder_below(self, tokenizer: Any) -> None:
        data = encoder_to_json(Tokenizer(tokenizer))
        data["files"]["templates/one/chat.txt"] = {"text": "a"}
        assert encoder_from_json(data).encode(["a cat ."])["input_ids"].shape[0] == 1  # pyright: ignore[reportArgumentType]

    def test_a_file_outside_the_folder_is_refused(self, tokenizer: Any) -> None:
        data = encoder_to_json(Tokenizer(tokenizer))
        data["files"]["../evil"] = {"text": ""}
        fails(ValueError, "must be inside its folder", lambda: encoder_from_json(data))
        data["files"] = []
        fails(ValueError, "^the JSON form of the encoder 'tokenizer' is malformed: ", lambda: encoder_from_json(data))

    def test_without_wrapping_the_way_out_is_told(self, tokenizer: Any) -> None:
        with pytest.raises(TypeError, match=r"wrap a Hugging Face tokenizer in Tokenizer") as caught:
            DeviceDict({"t": "a"}, encoders={"t": tokenizer})
        assert len(str(caught.value)) < 250


class TestWhereAnEncoderGoes:
    def test_it_stays_with_its_key(self, device: torch.device) -> None:
        v = Vocabulary(["a", "b"])
        d = DeviceDict({"s": ["b"], "n": {"s": ["a"], "t": ["free"]}}, encoders={"s": v})
        for m in (d.to(device), d.clone(), d.copy(), d.select("s", ("n", "s")), pickle.loads(pickle.dumps(d)),
                  DeviceDict(d), {"z": 1} | d, DeviceDict({"z": 1}) | d, d.to(device).cpu()):  # fmt: skip
            check_invariants(m)  # pyright: ignore[reportAttributeAccessIssue]
            assert m.decode("s") == ["b"] and m.decode(("n", "s")) == ["a"], m  # pyright: ignore[reportAttributeAccessIssue]
        assert d.flatten().decode("n.s") == ["a"] and d.flatten().decode("n.t") == ["free"]

    def test_update_brings_the_encoders_of_its_keys_only(self) -> None:
        d = DeviceDict({"s": ["a"], "t": ["b"]}, encoders=Vocabulary(["a", "b"]))
        other = DeviceDict({"s": ["a"]}, encoders={"s": Vocabulary(["b", "a"]), "t": Vocabulary(["x"])})
        d.update(other)
        assert d["s"].tolist() == [1] and d.decode("s") == ["a"] and d.decode("t") == ["b"]

    def test_one_encoder_for_every_key(self) -> None:
        d = DeviceDict({"a": "x", "n": {"b": ["y"]}}, encoders=Vocabulary(["x", "y"]))
        assert d["a"].item() == 0 and d.decode(("n", "b")) == ["y"]
        hooked = DeviceDict({"a": ["x", "yy"]}, encoders=lambda strings: torch.tensor([len(s) for s in strings]))
        assert hooked["a"].tolist() == [1, 2]

    @pytest.mark.parametrize("make", [DeviceDict, Copies, lambda d, **options: collate([d], **options)])  # pyright: ignore[reportUnknownLambdaType]
    def test_codes_are_not_read_by_another_encoder(self, make: Any) -> None:
        """They were: the copy decoded other strings."""
        old, new = Vocabulary(["a", "b"]), Vocabulary(["b", "a"])
        d = DeviceDict({"s": ["a"], "x": [1.0]}, encoders={"s": old})
        with pytest.raises(ValueError, match=r"^'s': expected strings of ") as caught:
            make(d, encoders={"s": new})
        assert str(caught.value) == (
            "'s': expected strings of Vocabulary(['b', 'a']), got strings of Vocabulary(['a', 'b']); "
            "give the strings themselves: decode it first"
        )
        with pytest.raises(ValueError, match=r"^'c': expected strings of "):  # codes of the encoder for every key
            make(DeviceDict({"c": torch.tensor([1])}, encoders=old), encoders={"c": new})
        for encoders in ({"s": Vocabulary(["a", "b"])}, {"x": new}, new):
            again = make(d, encoders=encoders)
            assert again["s"].flatten().tolist() == [0] and again.encoders["s"] == old
        both = make(DeviceDict({"c": torch.tensor([1])}, encoders=old), encoders=new)
        assert both.encoders["c"] == old
        names = DeviceDict({"s": "Ada"})
        assert make(names, encoders={"s": Utf8(8)})["s"].shape[-1] == 3, "every Utf8 decodes the codes of every other"
        assert DeviceDict({"s": d.decode("s")}, encoders={"s": new})["s"].tolist() == [1]

    def test_a_nested_dict_with_its_own_encoders_keeps_them(self) -> None:
        inner = DeviceDict({"s": "a"}, encoders={"s": Vocabulary(["b", "a"])})
        outer = DeviceDict({"s": "a", "inner": inner}, encoders={"s": Vocabulary(["a"])})
        assert outer["inner", "s"].item() == 1 and outer.decode(("inner", "s")) == outer.decode("s") == "a"

    def test_one_encoder_for_every_key_goes_along_with_the_keys(self) -> None:
        """Only encoders by key did: elsewhere the codes were read by another encoder."""
        codes = torch.tensor([97], dtype=torch.uint8)
        d = DeviceDict({"c": codes}, encoders=Vocabulary(map(str, range(200))))
        other = DeviceDict({"z": 1})
        for holder, key in ((other | d, "c"), (DeviceDict({"n": d}), ("n", "c")), (DeviceDict(d), "c")):
            assert holder.decode(key) == ["97"]
        other.update(d)
        assert other.decode("c") == ["97"]

    def test_codes_are_made_on_the_cpu_whatever_the_default_device(self) -> None:
        d = DeviceDict({"x": 1}, encoders={"v": Vocabulary(["a"])})
        with torch.device("meta"):
            d["v"], d["u"], d["e"] = "a", "text", [""]
        check_invariants(d)
        assert d.decode("v") == "a" and d.decode("u") == "text"


@pytest.mark.parametrize("encoder", [Utf8(), Vocabulary(["a"]), Hashing(4)], ids=repr)
@pytest.mark.parametrize("numbers", [[True, False], [0.5, 1.0], [1j, 0j]], ids=["bool", "float", "complex"])
def test_numbers_under_the_key_of_strings(tmp_path: Path, encoder: Any, numbers: list[Any]) -> None:
    """A key's encoder serves that key in nested dicts too, where the field may have numbers: they stay numbers."""
    d: Any = DeviceDict({"s": ["a", "a"], "n": {"s": numbers}}, encoders={"s": encoder})
    assert d["n"].tolist() == {"s": numbers}
    assert repr(encoder) in repr(d) and repr(encoder) not in repr(d["n"])
    assert not d["n"].clone().zero_()["s"].any()
    assert d.equal(("n", "s"), numbers[0]).tolist() == [True, False]
    if not isinstance(numbers[0], complex):
        assert list(d.rows.group_by(("n", "s"))) == sorted(numbers)
    second: Any = torch.split(d, 1)[1]
    assert second["n", "s"].tolist() == numbers[1:]
    d.fill_({"s": ["a", "a"], "n": {"s": numbers[::-1]}})
    d.save(tmp_path / "table")
    assert load(tmp_path / "table")["n"].tolist() == {"s": numbers[::-1]}


def test_numbers_of_another_dtype_than_the_codes() -> None:
    d = DeviceDict({"s": ["a"]})
    d["s"] = torch.tensor([97])
    assert "s" in d.encoders and d.tolist() == {"s": [97]} and d.add_(1)["s"].tolist() == [98]
    d = DeviceDict({"meta": {"x": 1}}, encoders={"meta": Utf8()})
    assert d.tolist() == {"meta": {"x": 1}}


@pytest.mark.parametrize("wrong", ["x\0y", "\ud800", "Grace"])
def test_of_strings_that_come_once_the_wrong_one_is_named(wrong: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(wrong))):
        Utf8(4).encode(s for s in ["ok", wrong, "b"])  # pyright: ignore[reportArgumentType]


class TestTokenizerErrors:
    def test_no_strings_have_no_width(self) -> None:
        with pytest.raises(ValueError, match=r"^no strings to tokenize, so the width of their codes is not known$"):
            Tokenizer(Words("a")).encode([])

    def test_codes_are_a_mapping(self) -> None:
        wrong: Any = torch.ones(1)
        message = r"^Tokenizer\(Words\) decodes ids, or a mapping with input_ids, got float32\[1\]$"
        fails(TypeError, message, lambda: Tokenizer(Words("a")).decode(wrong))

    def test_without_transformers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "transformers", None)
        with pytest.raises(ImportError, match=r"^this data holds a Tokenizer; pip install transformers$"):
            Tokenizer.from_json({"files": {}, "call": {}})

    def test_binary_files_are_encoded_in_base64(self) -> None:
        class Saves(Words):
            def save_pretrained(self, folder: str) -> None:
                (Path(folder) / "model").write_bytes(b"\xff\x00")
                (Path(folder) / "tokenizer.json").write_text('{"padding": 1, "model": 2}')

        expected = {"model": {"base64": "/wA="}, "tokenizer.json": {"text": '{"model": 2}'}}
        assert Tokenizer(Saves("a")).to_json() == {"files": expected, "call": {"padding": True}}


def test_codes_with_too_few_dimensions() -> None:
    d = DeviceDict({"s": torch.tensor(65, dtype=torch.uint8)})
    fails(ValueError, r"Utf8\(\) decodes codes of 1 dimensions or more, got shape \[\]", lambda: d.decode("s"))
