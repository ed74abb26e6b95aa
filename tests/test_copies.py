"""copy, deepcopy, pickle, torch.save and pytree: what comes back is whole, and its device is the real one."""

from __future__ import annotations

import copy
import enum
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import simulated
import torch
from checks import check_invariants, fails
from files import DTYPES, OPAQUE, torch_saved_and_loaded
from torch.utils import _pytree as pytree

from tensordict_lite import DeviceDict, DeviceMismatchError, Utf8, Vocabulary

SIM = simulated.SIM


class Key(str, enum.Enum):
    X = "x"


class Batch(DeviceDict, objects="keep", encoders={"s": Vocabulary(["a", "b"])}):
    """At module level, as what is pickled must be."""


def lengths(strings: Any) -> torch.Tensor:
    return torch.tensor([len(s) for s in strings])


def full() -> Batch:
    return Batch({"x": torch.arange(3.0), "s": ["b"], "n": {"t": "text", "e": {}}, "o": {1, 2}}, on_mismatch="move",
                 encoders={"h": lengths, "u": Utf8(9)}, dtype=torch.float64)  # fmt: skip


PROTOCOLS = range(2, pickle.HIGHEST_PROTOCOL + 1)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [*DTYPES.values(), *OPAQUE.values()], ids=str)
def test_every_dtype_in_every_protocol(dtype: torch.dtype) -> None:
    """torch writes pickles of unsigned, float8, float4 and bits tensors, and cannot read them."""
    tensor = torch.arange(48, dtype=torch.uint8).remainder(2).view(dtype)
    d = DeviceDict({"x": tensor[:2], "n": {"y": tensor.reshape(1, -1), "again": tensor[:2]}, "z": torch.ones(3)})
    d["same"] = d["x"]
    strided = DeviceDict({"t": tensor[:2].repeat(3).reshape(3, 2).t(), "0-d": tensor[0], "none": tensor[:0]})
    for one in (d, d.pack(), strided, strided.pack(), DeviceDict({"x": tensor}), DeviceDict({"x": tensor[:2]}).pack()):
        copies = [pickle.loads(pickle.dumps(one, protocol)) for protocol in PROTOCOLS]
        copies += [copy.deepcopy(one), pickle.loads(ForkingPickler.dumps(one)), torch_saved_and_loaded(one)]
        for again in copies:
            check_invariants(again)
            assert list(again) == list(one) and again.is_packed in (one.is_packed, True)
            for s, t in zip(again._tensors(), one._tensors(), strict=True):
                assert (s.dtype, s.shape, s.stride()) == (t.dtype, t.shape, t.stride())
                assert s.reshape(-1).view(torch.uint8).tolist() == t.reshape(-1).view(torch.uint8).tolist()


def test_an_unchanged_class_policy_is_not_pickled() -> None:
    assert b"Vocabulary" not in pickle.dumps(Batch({"x": torch.ones(1)}))


def test_pickling_an_empty_or_unplaced_dict(device: torch.device) -> None:
    for d in (DeviceDict(), DeviceDict(device=device), DeviceDict({"e": {}}, device=device)):
        again = pickle.loads(pickle.dumps(d))
        check_invariants(again)
        assert again.device == d.device and again == d


def test_copy_shares_tensors_deepcopy_does_not() -> None:
    d = full()
    for c in (copy.copy(d), d.copy()):
        check_invariants(c)
        assert c["x"] is d["x"] and c["n"] is not d["n"] and c["n", "t"] is d["n", "t"] and c._policy is d._policy
    deep = copy.deepcopy(d)
    check_invariants(deep)
    assert deep == d and deep["x"] is not d["x"] and deep["o"] is not d["o"] and type(deep) is Batch
    nested: Any = deep["n", "e"]
    assert nested._policy.encoders["u"] is d._policy.encoders["u"], "encoders are immutable"
    shared = {"a": d, "b": d["x"]}
    again = copy.deepcopy(shared)
    assert again["a"]["x"] is again["b"], "deepcopy's memo reaches the tensors"


def test_deepcopy_keeps_what_is_shared() -> None:
    model = torch.nn.Linear(2, 2)
    kept = {1}
    d = DeviceDict({"w": model.weight, "o": kept, "t": torch.ones(3)}, objects="keep")
    d["same"] = d["t"]
    deep, again, twice, inner = copy.deepcopy((d, model, d, kept))
    assert deep is twice and deep["w"] is again.weight and deep["o"] is inner and deep["same"] is deep["t"]
    assert deep["w"] is not d["w"] and type(deep["w"]) is torch.nn.Parameter
    packed = DeviceDict({"x": torch.ones(3), "n": {"y": torch.zeros(4)}}).pack()
    deep, x = copy.deepcopy((packed, packed["x"]))
    assert deep.is_packed and deep == packed and deep["x"].data_ptr() != packed["x"].data_ptr()
    x.fill_(7)
    assert deep["x"].tolist() == [7, 7, 7] and packed["x"].sum() == 3, "one memory, as before"
    rows = DeviceDict({"x": torch.rand(1000, 100)}).rows[3:4]
    assert copy.deepcopy(rows) == rows and copy.deepcopy(rows)["x"].untyped_storage().nbytes() == 400


def test_the_stager_of_checkpoints_stages_the_tensors() -> None:
    """It preferred ``__deepcopy__``, so it copied our dicts plainly, on their device, again for each save."""
    staging = pytest.importorskip("torch.distributed.checkpoint._state_dict_stager")
    stager = staging.StateDictStager(share_memory=True)
    for d in (full(), full().pack()):
        staged = [stager.stage({"model": d})["model"] for _ in range(2)]
        for again in staged:
            check_invariants(again)
            assert again == d and type(again) is Batch and again._policy == d._policy
            assert again.is_packed == d.is_packed and all(t.is_shared() for t in again._tensors())
        assert [t.data_ptr() for t in staged[0]._tensors()] == [t.data_ptr() for t in staged[1]._tensors()]


class TestPytree:
    def test_tree_map_keeps_everything(self, device: torch.device) -> None:
        d = full()
        out = pytree.tree_map_only(torch.Tensor, lambda t: t + 1, d)
        check_invariants(out)
        assert type(out) is Batch and out._policy is d._policy and out["x"].tolist() == [1, 2, 3] and out["o"] is d["o"]
        moved = pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), d)
        check_invariants(moved)
        assert moved.device == device and moved["n", "e"].device == device

    def test_foreign_leaves(self) -> None:
        d = DeviceDict({"x": 1.0, "n": {"y": 2}})
        leaves, spec = pytree.tree_flatten(d)
        assert len(leaves) == 2
        odd = pytree.tree_unflatten([None, "leaf"], spec)
        assert odd["x"] is None and odd["n", "y"] == "leaf" and odd.device == torch.device("cpu")
        assert pytree.tree_map(lambda t: t.item(), d) == {"x": 1.0, "n": {"y": 2}}

    def test_two_dicts_on_two_devices_map_together(self, device: torch.device) -> None:
        d = DeviceDict({"x": 1.0})
        out = pytree.tree_map(lambda a, b: a + b.cpu(), d, d.to(device))
        assert out["x"].item() == 2.0
        fails(ValueError, "mismatch", lambda: pytree.tree_map(lambda a, b: a, d, DeviceDict({"y": 1.0})))

    def test_key_paths(self) -> None:
        paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(DeviceDict({"n": {"y": 2}}))[0]]
        assert paths == ["['n']['y']"]

    def test_spec_round_trips_through_json(self) -> None:
        spec = pytree.tree_structure(DeviceDict({"x": 1.0, "n": {"y": 2}}))
        assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec

    def test_every_subclass_is_registered(self) -> None:
        class Local(Batch):
            pass

        assert len(pytree.tree_leaves(Local({"x": torch.ones(1), "y": torch.ones(1)}))) == 2

    def test_a_mapping_that_tree_map_inserts_keeps_tensors_at_their_keys(self) -> None:
        """Tensors were collected through any mapping but put back through ours only: b came back with a's tensor."""
        d = DeviceDict({"a": 1.0, "b": 2.0})
        odd = pytree.tree_map(lambda t: {"s": t * 10} if t == 1 else t * 10, d)
        assert odd.clone()["b"].item() == 20 and odd.to(SIM)["b"].item() == 20 and odd.copy()["a"] is odd["a"]

    def test_a_dict_left_on_two_devices_can_be_gathered(self) -> None:
        """It took the device of its first tensor, and ``to`` that device then returned it as it was."""
        mixed = pytree.tree_map(lambda t: t.to(SIM) if t.is_floating_point() else t, DeviceDict({"f": [1.0], "i": [1]}))
        assert mixed.device is None
        gathered = mixed.to(SIM)
        check_invariants(gathered)
        assert gathered["i"].device == SIM

    def test_nothing_can_be_stored_before_it_is_gathered(self) -> None:
        """The next write gave it a device that some of its tensors were not on."""
        mixed = pytree.tree_map(lambda t: t.to(SIM) if t.is_floating_point() else t, DeviceDict({"f": [1.0], "i": [1]}))
        for key in ("z", ("n", "z")):
            with pytest.raises(DeviceMismatchError, match=r"has tensors on several devices; \.to\(device\) it first"):
                mixed[key] = 1
        assert list(mixed) == ["f", "i"]

    def test_an_exported_program_names_the_public_class(self) -> None:
        assert '"tensordict_lite.DeviceDict"' in pytree.treespec_dumps(pytree.tree_structure(DeviceDict({"x": 1})))
        spec = pytree.tree_structure(DeviceDict(device="meta"))
        assert pytree.tree_unflatten([], pytree.treespec_loads(pytree.treespec_dumps(spec))).device is None


def test_keys_of_a_subclass_of_str() -> None:
    for key in (Key.X, np.str_("x")):
        d = DeviceDict({key: 1})
        assert pickle.loads(pickle.dumps(d)) == d


def test_an_encoder_is_written_once() -> None:
    """Every nested dict wrote its encoders again: thirty of them made thirty vocabularies."""
    big = Vocabulary(map(str, range(2000)))
    one = DeviceDict({"a": {"s": "1"}}, encoders={"s": big})
    many = DeviceDict({f"a{i}": {"s": "1"} for i in range(30)}, encoders={"s": big})
    sizes = [len(pickle.dumps(d)) for d in (one, many)]
    assert sizes[1] < sizes[0] + 30 * 1000


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_clone_with_a_nested_tensor() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    d = DeviceDict({"n": nested, "x": torch.ones(2)})
    copied = d.clone()
    assert copied == d and copied["x"] is not d["x"] and copied["n"] is not d["n"]


def test_a_lazy_tensor_is_read() -> None:
    """Loaders of large files make placeholders, which implement ``__torch_function__``."""

    class Lazy:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*(arg.tensor if isinstance(arg, Lazy) else arg for arg in args), **(kwargs or {}))

    for pack in (True, False):
        d = DeviceDict({"x": torch.ones(2), "y": torch.ones(2)})
        rebuild, (*head, parts, leaves) = (d.pack() if pack else d).__reduce__()
        lazy = [(Lazy(buffer), specs) for buffer, specs in parts], leaves and [*map(Lazy, leaves)]
        again = rebuild(*head, *lazy)
        assert again.is_packed == pack and again == {"x": torch.ones(2), "y": torch.ones(2)}


def test_pytree_may_leave_each_dict_on_its_own_device() -> None:
    d = DeviceDict({"x": torch.ones(1), "n": {"y": torch.ones(1)}})
    leaves, spec = pytree.tree_flatten(d)
    mixed = pytree.tree_unflatten([leaves[0], leaves[1].to("meta")], spec)
    assert mixed._device is None and mixed["n"].device == torch.device("meta")
    assert mixed.to("meta").device == torch.device("meta")


def test_the_error_of_another_base_is_raised_itself() -> None:
    class Registered:
        def __init_subclass__(cls, *, name: str, **options: Any) -> None:
            super().__init_subclass__(**options)

    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'name'"):

        class Nameless(DeviceDict, Registered):
            pass
