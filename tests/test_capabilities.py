"""What a device can do is found by a trial: no type of device is trusted by its name, and none is refused by it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import simulated
import torch
from checks import fails

import tensordict_lite
from tensordict_lite import DeviceDict, collate, prefetch
from tensordict_lite._memory import device as device_module
from tensordict_lite._memory.device import CPU, META, DeviceCapabilities, capabilities, is_capturing, record_stream
from tensordict_lite.distributed import channel

SIM, OTHER = simulated.SIM, simulated.OTHER
NOTHING = DeviceCapabilities()


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """No accelerator was tried out yet. What is cached during the test is forgotten after it."""
    known = {CPU: capabilities(CPU), META: capabilities(META)}
    monkeypatch.setattr(device_module, "_capabilities", known)
    return known


@pytest.fixture
def able(untried: dict[Any, Any], streams: simulated.Streams) -> simulated.Streams:
    """The simulated devices have streams and pinned memory, and nobody knows yet."""
    for device in (SIM, OTHER):
        del untried[device]
    return streams


def raises(error: Exception) -> Any:
    def method(*_: Any, **__: Any) -> Any:
        raise error

    return method


class TestTrial:
    def test_the_host_and_meta(self) -> None:
        assert capabilities(CPU) == DeviceCapabilities(byte_views=True) and capabilities(META) == NOTHING

    def test_a_backend_in_python_has_no_streams_though_the_classes_exist(self, untried: dict[Any, Any]) -> None:
        assert torch.Stream(device="sim").device_index == 0
        for device in (SIM, OTHER):
            assert capabilities(device) == DeviceCapabilities(accelerator=True, byte_views=True) == untried[device]

    def test_a_backend_with_all_of_it(self, able: simulated.Streams, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
        assert capabilities(OTHER) == DeviceCapabilities(True, True, True, True)
        assert "1 pinned on sim:1" in able.log and "host waits for main" not in able.log, "a busy stream stops no trial"

    def test_it_is_tried_once(self, able: simulated.Streams) -> None:
        first = capabilities(SIM)
        able.log.clear()
        assert capabilities(SIM) is first and not able.log

    @pytest.mark.parametrize(
        "error", [RuntimeError("unsupported"), NotImplementedError("none"), AttributeError("none")]
    )
    @pytest.mark.parametrize("method", ["__enter__", "record_event", "wait_stream", "synchronize"])
    def test_one_thing_is_missing_of_the_streams(
        self, able: simulated.Streams, monkeypatch: pytest.MonkeyPatch, method: str, error: Exception
    ) -> None:
        monkeypatch.setattr(simulated.Stream, method, raises(error))
        assert capabilities(SIM) == DeviceCapabilities(accelerator=True, byte_views=True)

    @pytest.mark.parametrize("error", [RuntimeError("unsupported"), NotImplementedError("none")])
    def test_events_and_record_stream(
        self, able: simulated.Streams, monkeypatch: pytest.MonkeyPatch, error: Exception
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(simulated.Event, "synchronize", raises(error))
            assert not capabilities(SIM).streams
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "record_stream", raises(error))
            assert not capabilities(OTHER).streams

    def test_streams_without_pinned_memory(self, able: simulated.Streams, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
        able.can_pin = False
        assert capabilities(SIM) == DeviceCapabilities(True, True, False, True)
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: False)
        able.can_pin = True
        assert not capabilities(OTHER).pinned_memory

    def test_a_device_that_does_not_exist_is_not_asked(
        self, untried: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Some backends end the process."""
        for name in ("current_stream", "device_index"):
            monkeypatch.setattr(torch.accelerator, name, raises(AssertionError("asked")))
        monkeypatch.setattr(torch, "empty", raises(AssertionError("asked")))
        for index in (2, 7, 100):
            assert capabilities(torch.device("sim", index)) == NOTHING
        assert set(untried) == {CPU, META}

    @pytest.mark.parametrize("name", ["cuda:0", "xpu:0", "mps:0", "hpu:0", "mtia:0", "xla:0"])
    def test_what_is_not_the_current_accelerator_gets_the_safe_way(self, untried: dict[Any, Any], name: str) -> None:
        assert capabilities(torch.device(name)) == NOTHING and set(untried) == {CPU, META}

    @pytest.mark.parametrize("name", ["cuda", "xpu", "mps", "hpu", "mtia"])
    def test_no_type_is_trusted_by_its_name(
        self, untried: dict[Any, Any], monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(name))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: simulated.Stream(SIM))
        monkeypatch.setattr(device_module, "_stream_knows", True)
        monkeypatch.setattr(device_module, "_has_byte_views", lambda _: True)
        found = capabilities(torch.device(name, 0))
        assert found == DeviceCapabilities(accelerator=True, byte_views=name != "mps"), "torch has no such streams here"

    def test_without_memory_it_is_tried_again(self, able: simulated.Streams) -> None:
        with simulated.memory_left(0):
            assert capabilities(SIM) == DeviceCapabilities(accelerator=True)
        assert capabilities(SIM).streams

    def test_a_graph_that_is_captured_sees_no_trial(self, able: simulated.Streams) -> None:
        able.current[0].capturing = True
        assert capabilities(SIM) == DeviceCapabilities(accelerator=True, byte_views=True) and not able.log
        able.current[0].capturing = False
        assert capabilities(SIM).streams

    def test_no_byte_views(self, untried: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.Tensor, "set_", raises(NotImplementedError("no storage")))
        assert capabilities(SIM) == DeviceCapabilities(accelerator=True)
        monkeypatch.undo()
        device_module._capabilities[OTHER] = DeviceCapabilities(accelerator=True)
        try:
            d = DeviceDict({"x": [1.0], "y": [2]}).to(OTHER)
            assert not d.pack().is_packed and d.cpu() == {"x": torch.ones(1), "y": torch.tensor([2])}
        finally:
            del device_module._capabilities[OTHER]


class TestForkedProcess:
    """In a forked child torch refuses to use the accelerator of its parent. Its own error must reach the caller."""

    ERROR = "Cannot re-initialize sim in forked subprocess"

    def test_when_the_parent_had_tried_it_out(
        self, streams: simulated.Streams, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.accelerator, "current_stream", raises(RuntimeError(self.ERROR)))
        d = DeviceDict({"x": [1.0], "y": [2]})
        for source in (d, d.pack()):
            with pytest.raises(RuntimeError, match=self.ERROR):
                source.to("sim")

    def test_when_nobody_had(self, untried: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.accelerator, "current_stream", raises(RuntimeError(self.ERROR)))
        monkeypatch.setattr(torch.Tensor, "to", raises(RuntimeError(self.ERROR)))
        d = DeviceDict({"x": [1.0], "y": [2]})
        for source in (d, d.pack()):
            with pytest.raises(RuntimeError, match=self.ERROR):
                source.to("sim")
        fails(RuntimeError, self.ERROR, lambda: list(prefetch([d], "sim")))
        assert set(untried) == {CPU, META}, "a child of this process may have another accelerator"


class TestCapture:
    def test_before_streams_could_tell_the_module_is_asked_on_the_device(
        self, streams: simulated.Streams, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(device_module, "_stream_knows", False)
        assert not is_capturing(SIM), "the module of a backend may have no such function"
        monkeypatch.setattr(
            simulated.sim, "is_current_stream_capturing", lambda: simulated.sim.current == 1, raising=False
        )
        assert is_capturing(OTHER) and not is_capturing(SIM) and simulated.sim.current == 0

    def test_the_guard_of_older_versions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(device_module, "_device_index", None)
        with device_module.on_device(OTHER):
            assert simulated.sim.current == 1
        assert simulated.sim.current == 0


def test_record_stream_once_for_each_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, _: seen.append(self.data_ptr()))
    memory, single, empty = torch.zeros(100), torch.zeros(3), torch.zeros(0)
    stream: Any = None
    record_stream([memory[3:9], memory, memory[5], single, memory[50:], single[1:]], stream)
    assert seen == [memory[3:9].data_ptr(), single.data_ptr()]
    seen.clear()
    record_stream([empty, single, empty], stream)
    assert single.data_ptr() in seen


def test_the_host_asks_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker process must not initialize a device, and host operations must not pay for the question."""
    for name in ("current_accelerator", "current_stream", "device_count", "current_device_index"):
        monkeypatch.setattr(torch.accelerator, name, raises(AssertionError("asked")))
    d = DeviceDict({"x": [1.0], "n": {"y": [2]}})
    for source in (d, d.pack()):
        assert source.to("cpu") is source and source.half().cpu().numpy() and source.to("meta").device == META
        assert source.clone().pack().is_packed and source.to("cpu", torch.float64, copy=True) is not source
    assert collate([d, d]).is_packed and len(list(prefetch([d], "cpu"))) == 1


def test_no_accelerator_is_named_in_the_code() -> None:
    """CUDA has a name only in methods that are called so, and where torch.multiprocessing knows no other device."""
    package = Path(tensordict_lite.__file__).parent
    named: dict[str, int] = {}
    for path in package.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        words = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        words += [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        found = sum(word in ("cuda", "xpu", "npu", "hpu", "mtia", "mps", "xla") for word in words)
        if found:
            named[path.relative_to(package).as_posix()] = found
    assert named == {
        "_dict/device_dict.py": 3,  # is_cuda, and the two forms of cuda()
        "_memory/cast.py": 1,  # mps: torch may read the source of an asynchronous copy after it was freed
        "_memory/device.py": 1,  # mps: no byte views
        "_tree/sendable.py": 1,  # torch.multiprocessing shares memory of the CPU and of CUDA
    }


@pytest.mark.parametrize(
    ("config", "device"),
    [
        ("cpu:gloo", "cpu"), ("cpu:gloo,cuda:nccl", "cpu"), ("cuda:nccl,cpu:gloo", "cpu"), ("sim:any", "sim:0"),
        ("sim:any,cuda:nccl", "sim:0"),
    ],
)  # fmt: skip
def test_a_process_group_is_asked_for_its_device(monkeypatch: pytest.MonkeyPatch, config: str, device: str) -> None:
    monkeypatch.setattr(channel, "process_group", lambda group: group)
    monkeypatch.setattr(channel.dist, "get_backend_config", lambda _: config)
    assert channel.comm_device(object()) == torch.device(device)
