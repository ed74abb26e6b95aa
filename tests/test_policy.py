"""The options of a dict made of another dict: those of the class, of the other dict, and of the call, in this order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import simulated
import torch
from checks import fails
from torch import Tensor

from tensordict_lite import DeviceDict, Hashing, TypedDeviceDict, Utf8, Vocabulary, collate, stack
from tensordict_lite._tree.policy import Policy, options_from_json

A, B, C = Vocabulary(["a"]), Vocabulary(["b", "a"]), Vocabulary(["c", "b", "a"])
SIM = simulated.SIM


class Bare(DeviceDict[Any]):
    pass


class Own(DeviceDict[Any], encoders={"s": A}, on_mismatch="move", objects="keep", dtype=torch.float64):
    pass


class Doubles(DeviceDict[Any], encoders={"s": A}, on_mismatch="move", dtype=torch.float64):
    pass


class Typed(TypedDeviceDict, encoders={"s": A}, dtype=torch.float64):
    x: Tensor | None = None
    s: Tensor | None = None
    t: Tensor | None = None
    n: DeviceDict[Any] | None = None


def options(d: DeviceDict[Any]) -> tuple[Any, ...]:
    return d._policy.on_mismatch, d._policy.objects, d._policy.dtype


PLAIN, OWN = ("error", "error", None), ("move", "keep", torch.float64)


class TestMadeOfAnother:
    def test_a_class_with_options_keeps_them_and_takes_the_encoders(self) -> None:
        d = DeviceDict({"t": "b"}, encoders={"t": B}, dtype=torch.float16)
        made = Own(d)
        assert options(made) == OWN and made.encoders == {"s": A, "t": B}
        assert made.decode("t") == "b" and made.update({"x": 1.0, "o": {1}}) is None
        assert made["x"] == 1.0 and type(made["x"]) is float and made["o"] == {1}
        typed = Typed(d)  # pyright: ignore[reportCallIssue]
        assert options(typed) == ("error", "error", torch.float64) and typed.encoders == {"s": A, "t": B}
        assert Own(Own({"x": 1}, on_mismatch="error"))._policy == Own._class_policy, "its class says otherwise"

    def test_the_encoders_of_the_data_win_over_the_class(self) -> None:
        made = Own(DeviceDict({"s": "b"}, encoders={"s": B}))
        assert made.encoders == {"s": B} and made.decode("s") == "b"

    def test_one_encoder_for_every_key_comes_along_with_the_keys(self) -> None:
        made = Own(DeviceDict({"s": "b", "t": "b"}, encoders=B))
        assert made.encoders == {"s": B, "t": B} and made._policy.default_encoder == Utf8()
        mixed = Own(DeviceDict({"s": "b", "t": "b"}, encoders=B) | DeviceDict({"t": "c"}, encoders={"t": C}))
        assert mixed.encoders == {"s": B, "t": C}, "that of a key wins over the one for all"

    def test_codes_that_were_stored_as_they_are_come_along_with_the_encoder_for_every_key(self) -> None:
        codes = DeviceDict({"s": torch.tensor(0)}, encoders=B)
        assert codes.encoders == {} and codes.decode("s") == "b"
        nested = Own({"n": codes})
        updated = DeviceDict()
        updated.update(codes)
        for made in (Own(codes), nested["n"], updated, Typed({"n": codes})["n"], DeviceDict() | codes):  # pyright: ignore[reportCallIssue]
            assert made.encoders["s"] == B and made.decode("s") == "b"  # pyright: ignore[reportAttributeAccessIssue]

    def test_a_class_without_options_takes_all(self) -> None:
        d = DeviceDict({"t": "b"}, encoders=B, dtype=torch.float16, objects="keep", on_mismatch="move")
        for cls in (DeviceDict, Bare):
            assert cls(d)._policy is d._policy
        assert options(DeviceDict(Own({"x": 1}))) == OWN and DeviceDict(Own()).encoders == {"s": A}

    def test_what_is_given_wins_over_both(self) -> None:
        d = DeviceDict({"t": "b"}, encoders={"t": B}, dtype=torch.float16)
        made = Own(d, encoders={"s": C}, on_mismatch="error", objects="error", dtype=torch.bfloat16)
        assert options(made) == ("error", "error", torch.bfloat16) and made.encoders == {"s": C, "t": B}
        for name, value in (("on_mismatch", "move"), ("objects", "keep"), ("dtype", torch.float64), ("encoders", C)):
            policy = DeviceDict(d, **{name: value})._policy  # pyright: ignore[reportArgumentType]
            changed = policy.default_encoder if name == "encoders" else getattr(policy, name)
            assert changed == value and policy != d._policy
            assert policy.encoders == {"t": B}
        assert d._policy == Policy({"t": B}, dtype=torch.float16), "a policy is never changed"

    def test_the_device(self) -> None:
        d = DeviceDict(device=SIM)
        assert DeviceDict(d).device == Own(d).device == SIM
        assert DeviceDict(d, device="cpu").device == torch.device("cpu")
        assert DeviceDict(dict(d)).device is None

    def test_several_bases_with_policies_add_up(self) -> None:
        class Moves(DeviceDict, on_mismatch="move"):
            pass

        class Keeps(DeviceDict, objects="keep", encoders={"s": Vocabulary(["a"])}):
            pass

        class Both(Moves, Keeps, dtype=torch.float64):
            pass

        policy = Both._class_policy
        assert (policy.on_mismatch, policy.objects, policy.dtype) == ("move", "keep", torch.float64)
        assert "s" in policy.encoders


class TestNested:
    def test_a_mapping_has_the_options_of_what_it_is_in(self) -> None:
        d = Own({"n": {"m": {"s": "a"}}}, encoders={"t": B}, dtype=torch.float16)
        assert type(d["n", "m"]) is Own and d["n"]._policy is d._policy
        assert d["n", "m"].encoders == {"s": A, "t": B} and d["n", "m"]._policy.dtype == torch.float16

    def test_a_dict_without_options_has_those_of_what_it_is_in_and_its_encoders(self) -> None:
        inner = DeviceDict({"t": "b"}, encoders=B, dtype=torch.float16)
        for cls in (DeviceDict, Bare):
            nested = Own({"n": cls(inner)})["n"]
            assert type(nested) is cls and options(nested) == OWN
            assert nested.encoders == {"s": A, "t": B} and nested._policy.default_encoder == Utf8()

    def test_a_class_with_options_keeps_its_own(self) -> None:
        inner = Own({"t": "b"}, encoders={"t": B}, objects="error")
        for outer in (
            DeviceDict({"n": inner}),
            Bare({"n": inner}),
            Typed({"n": inner}),  # pyright: ignore[reportCallIssue]
            DeviceDict().copy() | {"n": inner},
        ):
            assert type(outer["n"]) is Own and outer["n"]._policy is inner._policy  # pyright: ignore[reportAttributeAccessIssue]
        twice = Own({"n": inner}, encoders={"u": C})["n"]
        assert twice._policy is inner._policy, "of one class, of several instances"

    def test_unflatten_of_a_class_with_options(self) -> None:
        flat = DeviceDict({"s": "b", "n": {"s": "c"}}, encoders={"s": C}, dtype=torch.float16).flatten()
        back = Own.unflatten(flat)
        assert options(back) == options(back["n"]) == OWN
        assert (back.decode("s"), back.decode(("n", "s"))) == ("b", "c")

    def test_a_declared_class(self) -> None:
        class Inner(TypedDeviceDict, encoders={"s": B}, objects="keep"):
            s: Tensor
            t: Tensor | None = None

        class Plain(TypedDeviceDict):
            t: Tensor

        class Outer(TypedDeviceDict, encoders={"t": C}, dtype=torch.float64):
            n: Inner
            p: Plain | None = None

        d = Outer.from_dict({"n": {"s": "b"}, "p": {"t": "c"}})
        assert d["n"]._policy is not d._policy and d["n"].encoders == {"s": B}, "its class has options"  # pyright: ignore[reportAttributeAccessIssue]
        assert options(d["n"]) == ("error", "keep", None)  # pyright: ignore[reportArgumentType]
        assert options(d["p"]) == ("error", "error", torch.float64) and d["p"].encoders == {"t": C}  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
        given = DeviceDict({"s": "a", "t": "a"}, encoders={"s": A, "t": A}, dtype=torch.float16)
        n = Outer.from_dict({"n": given})["n"]
        assert type(n) is Inner and options(n) == ("error", "keep", None) and n.encoders == {"s": A, "t": A}


class Outer(TypedDeviceDict, dtype=torch.float64):
    n: DeviceDict[Any]


class TestOfFiles:
    @pytest.mark.parametrize("cls", [Doubles, Outer])
    def test_options_of_a_class_hold_in_nested_dicts(self, cls: type[DeviceDict[Any]], tmp_path: Path) -> None:
        DeviceDict({"n": {"m": {"x": 1.0}}}).save(tmp_path / "d")
        d = cls.load(tmp_path / "d")
        d["n", "m", "y"] = d["n"]["m"]["z"] = 0.5
        assert d["n", "m", "y"].dtype == d["n", "m", "z"].dtype == torch.float64
        assert d["n"]["m"]._policy == cls._class_policy


class TestUpdate:
    def test_brings_the_encoders_of_its_keys_alone(self) -> None:
        d = DeviceDict({"s": "a"}, encoders={"s": A})
        other = DeviceDict({"s": "b"}, encoders={"s": B, "t": C}, dtype=torch.float64)
        d.update(other)
        assert d.encoders == {"s": B} and d.decode("s") == "b" and d._policy.dtype is None
        d.update(DeviceDict({"t": "c", "u": "c"}, encoders=C), u=torch.zeros(1))
        assert d.encoders == {"s": B, "t": C} and d._policy.default_encoder == Utf8()
        d.update(dict(other))
        assert d.encoders == {"s": B, "t": C}

    def test_a_string_is_encoded_with_the_encoder_of_its_key(self) -> None:
        d = DeviceDict(encoders=Hashing(4))
        d["s"] = "a"
        assert d.encoders == {"s": Hashing(4)} and d["s"].dtype == torch.int64
        d.update({"t": "a", "n": {"u": "a"}})
        assert d.encoders == {"s": Hashing(4), "t": Hashing(4)} and d["n"].encoders["u"] == Hashing(4)  # pyright: ignore[reportAttributeAccessIssue]

    def test_update_with_keywords_over_a_dict_with_encoders(self) -> None:
        """The keyword's string was labelled with the encoder of the dict's field of that name."""
        d, other = DeviceDict(), DeviceDict({"s": ["cat"]}, encoders={"s": Vocabulary(["cat"])})
        d.update(other, s="dog")
        assert d.decode("s") == "dog"


class TestPolicyItself:
    def test_with_encoders(self) -> None:
        policy = Policy({"s": A}, dtype=torch.float64)
        assert policy.with_encoders({}) is policy is policy.with_encoders({"s": Vocabulary(["a"])})
        more = policy.with_encoders({"s": B, "t": C})
        assert more == Policy({"s": B, "t": C}, dtype=torch.float64) and policy.encoders == {"s": A}
        assert policy.with_encoders({"s": B}).encoders == {"s": B}
        assert policy.with_encoders({"t": A}).encoders == {"s": A, "t": A}

    def test_carried(self) -> None:
        policy = Policy({"s": A})
        assert policy.carried(["s", "t"]) is policy.encoders == {"s": A}
        assert Policy({"s": A, "u": C}, B).carried([]) == {"s": A, "u": C}
        assert Policy({"s": A}, B).carried(["s", "t"]) == {"s": A, "t": B}

    def test_override(self) -> None:
        policy = Policy({"s": A}, B, "move", "keep", torch.float64)
        assert policy.override() == policy
        assert policy.override({"t": C}) == Policy({"s": A, "t": C}, B, "move", "keep", torch.float64)
        assert policy.override({"s": C}).encoders == {"s": C}
        assert policy.override(C) == Policy({"s": A}, C, "move", "keep", torch.float64)
        changed = policy.override(on_mismatch="error", objects="error", dtype=torch.float16)
        assert changed == Policy({"s": A}, B, "error", "error", torch.float16)
        assert policy == Policy({"s": A}, B, "move", "keep", torch.float64), "a policy is never changed"

    def test_callables_become_encoders(self) -> None:
        changed = Policy().override({"s": len}), Policy().override(len)
        assert changed[0].encoder("s") == changed[1].encoder("t") != len

    @pytest.mark.parametrize(("options", "error", "message"), [
        ({"on_mismatch": "mvoe"}, ValueError, "on_mismatch is 'error' or 'move', got 'mvoe'"),
        ({"on_mismatch": "keep"}, ValueError, "on_mismatch is 'error' or 'move', got 'keep'"),
        ({"objects": "move"}, ValueError, "objects is 'error' or 'keep', got 'move'"),
        ({"dtype": torch.int64}, TypeError,
         "dtype must be a floating-point torch.dtype (for floating-point host values), got torch.int64"),
        ({"dtype": "float32"}, TypeError,
         "dtype must be a floating-point torch.dtype (for floating-point host values), got 'float32'"),
        ({"encoders": {1: A}}, TypeError,
         "encoders= maps keys, which are str, to encoders; got the key 1; "
         "a key's encoder serves that key in nested dicts too"),
    ])  # fmt: skip
    def test_a_wrong_option(self, options: Any, error: type[Exception], message: str) -> None:
        fails(error, f"^{re.escape(message)}$", lambda: Policy().override(**options))

    @pytest.mark.parametrize("encoders", [3, {"s": 3}, Utf8])
    def test_what_is_no_encoder(self, encoders: Any) -> None:
        fails(TypeError, "encoder", lambda: Policy().override(encoders))


@pytest.mark.parametrize("join", [stack, collate])
class TestJoined:
    def test_encoders_of_all_are_brought_and_the_first_wins(self, join: Any) -> None:
        codes = torch.tensor(0)
        first = DeviceDict({"s": codes, "t": codes}, encoders={"s": B, "u": A})
        second = DeviceDict({"s": codes, "t": codes}, encoders={"t": C})
        assert join([first, second]).encoders == {"s": B, "t": C, "u": A}
        both = join([first, DeviceDict({"s": codes, "t": codes}, encoders={"u": B})])
        assert both.encoders == {"s": B, "u": A}, "an encoder of a key that is not there is no conflict"
        with pytest.raises(ValueError, match=r"^'s': expected strings of Vocabulary.* in (dict|sample) 1; give"):
            join([first, DeviceDict({"s": codes, "t": codes}, encoders={"s": A})])

    def test_utf8_of_two_lengths(self, join: Any) -> None:
        one, two = (DeviceDict({"s": "ab"}, encoders=Utf8(length)) for length in (2, 3))
        assert join([one, two]).encoders == {"s": Utf8(2)} and join([one, two]).decode("s") == ["ab", "ab"]


class TestPolicyAsData:
    """What pickle and files hold of a policy comes back as it was, or is refused."""

    FULL = Policy({"s": A}, B, "move", "keep", torch.float64)

    def test_an_option_with_its_default_is_not_written(self) -> None:
        assert Policy().options_to_json() == {}
        data = self.FULL.options_to_json()
        assert data == {"on_mismatch": "move", "objects": "keep", "dtype": "float64"}
        assert Policy().override(**options_from_json(data)) == Policy({}, Utf8(), "move", "keep", torch.float64)

    def test_an_option_that_a_file_lacks_has_its_default(self) -> None:
        assert Policy().override(**options_from_json({"objects": "keep"})) == Policy(objects="keep")

    def test_an_option_of_a_newer_version(self) -> None:
        message = "^the option 'later' is unknown; it may need a newer version of this package$"
        fails(ValueError, message, lambda: options_from_json({"later": 1}))

    @pytest.mark.parametrize("wrong", ["int64", "bool", "nonsense", 1, ["float64"], {}, False])
    def test_a_wrong_dtype_of_a_file(self, wrong: Any) -> None:
        fails(ValueError, r"is not a floating-point dtype$", lambda: options_from_json({"dtype": wrong}))

    def test_a_string_of_a_class_of_its_own_is_no_dtype_of_a_file(self) -> None:
        class Name(str):
            pass

        with pytest.raises(ValueError, match=r"^'float64' is not a floating-point dtype$"):
            options_from_json({"dtype": Name("float64")})

    @pytest.mark.parametrize("wrong", [1, True, ["move"], "", "mo", "MOVE", "drop"])
    @pytest.mark.parametrize("name", ["on_mismatch", "objects"])
    def test_a_wrong_choice_of_a_file(self, name: str, wrong: Any) -> None:
        fails(ValueError, f"^{name} is 'error' or '(move|keep)', got ", lambda: options_from_json({name: wrong}))

    def test_an_option_equal_to_a_choice_that_is_no_string_is_refused(self) -> None:
        class Equal:
            def __eq__(self, other: object) -> bool:
                return other == "move"

            def __hash__(self) -> int:
                return hash("move")

        fails(ValueError, r"^on_mismatch is 'error' or 'move', got <", lambda: Policy().override(on_mismatch=Equal()))

    def test_the_default_of_another(self) -> None:
        own = Policy({"s": A}, dtype=torch.float64)
        assert own.with_default_of(Policy({"t": C}), ["s", "t"]) is own, "the other was given no default"
        made = own.with_default_of(Policy({"t": C}, B), ["s", "t", "u"])
        assert dict(made.encoders) == {"s": B, "u": B}
        assert "t" not in made.encoders and made.encoder("u") == B and made.dtype == torch.float64
        assert dict(own.encoders) == {"s": A}

    def test_an_unknown_option(self) -> None:
        with pytest.raises(TypeError) as told:
            DeviceDict({}, on_mismatched="move")  # pyright: ignore[reportCallIssue]
        assert str(told.value) == (
            "DeviceDict() has no option 'on_mismatched', did you mean 'on_mismatch'? "
            "its options are device, encoders, on_mismatch, objects, dtype; "
            'a field goes into a mapping: DeviceDict({"on_mismatched": ...})'
        )
        with pytest.raises(TypeError) as told:
            type("Sub", (DeviceDict,), {}, zzzz=1)
        assert str(told.value) == (
            "class Sub has no option 'zzzz'; its options are encoders, on_mismatch, objects, dtype"
        )


def test_an_update_adds_the_encoders_it_brings_to_those_it_encodes_with() -> None:
    d = DeviceDict({"x": 1}, encoders=A)
    d.update(DeviceDict({"s": "b"}, encoders={"s": B}), t="a")
    assert d.encoders == {"s": B, "t": A}
    assert d.decode("s") == "b" and d.decode("t") == "a"


class Labelled(TypedDeviceDict):
    label: Tensor


LABELLED: Any = Labelled


class TestMisspelledEncoders:
    LABEL = Vocabulary(["cat"])

    @pytest.mark.parametrize("make", [
        lambda **options: DeviceDict({"label": ["cat"]}, **options),
        lambda **options: DeviceDict({"n": {"label": "cat"}, "x": 1}, **options),
        lambda **options: DeviceDict(DeviceDict({"label": ["cat"]}), **options),
        lambda **options: LABELLED({"label": ["cat"]}, **options),
        lambda **options: LABELLED(label=["cat"], **options),
        lambda **options: Labelled.from_dict({"label": ["cat"]}, **options),
    ])  # fmt: skip
    def test_a_key_close_to_strings_without_an_encoder(self, make: Any) -> None:
        with pytest.raises(ValueError, match="encoders= has") as caught:
            make(encoders={"lable": self.LABEL})
        assert str(caught.value) == (
            "encoders= has 'lable', which is no key, and the strings of 'label' have no encoder; did you mean 'label'? "
            "If 'lable' comes later, give 'label' an encoder too, such as Utf8()"
        )
        make(encoders={"lable": self.LABEL, "label": Utf8()})

    @pytest.mark.parametrize(
        ("data", "encoders"),
        [
            ({"label": ["cat"]}, {"species": LABEL}),  # comes later
            ({"label": [1]}, {"lable": LABEL}),  # no strings
            ({"label": ["cat"]}, {"label": LABEL, "labels": LABEL}),
            ({"label": ["cat"]}, LABEL),
            ({"n": {"label": ["cat"]}}, {"label": LABEL}),
            ({}, {"label": LABEL}),
        ],
    )
    def test_what_is_no_mistake(self, data: Any, encoders: Any) -> None:
        assert list(DeviceDict(data, encoders=encoders)) == list(data)

    def test_the_encoder_of_a_class_counts(self) -> None:
        class Species(DeviceDict[Any], encoders={"label": Vocabulary(["cat"])}):
            pass

        assert Species({"label": ["cat"]}, encoders={"lable": self.LABEL}).decode("label") == ["cat"]


class TestUpdateBringsEncoders:
    OURS, THEIRS = Vocabulary(["cat", "dog"]), Vocabulary(["dog", "cat"])

    @pytest.mark.parametrize("write", [
        lambda d, other: d.update(other.select("k")),
        lambda d, other: d.__ior__(other.select("k")),
        lambda d, other: d.update(n=other.select("k")) or d.update(other.select("k")),
    ])  # fmt: skip
    def test_codes_keep_the_encoder_that_made_them(self, write: Any) -> None:
        d: Any = DeviceDict({"k": ["cat"], "n": {"k": ["cat"]}}, encoders={"k": self.OURS})
        write(d, DeviceDict({"k": ["dog"]}, encoders={"k": self.THEIRS}))
        assert d.decode("k") == ["dog"] and d["k"].tolist() == [0]
        assert d.decode(("n", "k")) == (["cat"] if d["n"].encoders["k"] == self.OURS else ["dog"])
