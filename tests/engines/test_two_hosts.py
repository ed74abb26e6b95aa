"""Two hosts: network namespaces that a pair of virtual interfaces joins, each with its rank.

Delay and loss are not tested: few kernels have netem.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PENGUINS = HERE.parent.parent / "examples" / "ddp_penguins.py"
TIMEOUT = 8
"""Seconds until a call without an answer raises an error: the timeout of the group."""
SLACK = 4
"""Seconds that a busy machine may take longer."""
MINE = r"tdl-\d-(\d+)"
"""The names of the namespaces, with the process that made them."""


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def remove(name: str) -> None:
    """Remove a namespace, and the processes that are still in it."""
    with contextlib.suppress(subprocess.CalledProcessError):  # it is gone
        for process in ip("netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        ip("netns", "del", name)


def present() -> dict[str, int]:
    """The namespaces of these tests, and the process that made each."""
    found = (re.match(MINE, line) for line in ip("netns", "list").splitlines())
    return {match[0]: int(match[1]) for match in found if match}


def remove_leftovers() -> None:
    """Remove the namespaces of test processes that were killed."""
    for name, maker in present().items():
        if not Path(f"/proc/{maker}").exists():
            remove(name)


def make_hosts() -> list[str]:
    names = [f"tdl-{i}-{os.getpid()}" for i in range(2)]
    for name in names:
        ip("netns", "add", name)
    ip("-n", names[0], "link", "add", "name", "eth", "type", "veth", "peer", "name", "eth", "netns", names[1])
    for i, name in enumerate(names):
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "eth")
        ip("-n", name, "link", "set", "eth", "up")
    return names


def remove_hosts() -> None:
    for name, maker in present().items():
        if maker == os.getpid():
            remove(name)


def refusal() -> str:
    """Why there can be no namespaces here. Empty if there can be."""
    if shutil.which("ip") is None:
        return "iproute2 is not installed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        remove_leftovers()
        make_hosts()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces are refused: {getattr(error, 'stderr', error)}"
    finally:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            remove_hosts()
    return ""


REFUSED = refusal()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.ranks,
    pytest.mark.xdist_group("two hosts"),
    pytest.mark.skipif(bool(REFUSED), reason=REFUSED),
]


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    remove_leftovers()
    try:
        yield make_hosts()
    finally:
        remove_hosts()


@contextlib.contextmanager
def running(hosts: list[str], *arguments: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Run Python on each host. ``RANK`` in the arguments is the number of the host."""
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "eth", "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"}
    pipe = subprocess.PIPE
    programs: list[subprocess.Popen[str]] = []
    try:
        for rank, host in enumerate(hosts):
            command = [argument.replace("RANK", str(rank)) for argument in arguments]
            command = ["ip", "netns", "exec", host, sys.executable, *command]
            programs.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=env))
        yield programs
    finally:
        for program in programs:
            program.kill()
            program.communicate()


def ranks(hosts: list[str], what: str) -> contextlib.AbstractContextManager[list[subprocess.Popen[str]]]:
    return running(hosts, str(HERE / "host.py"), "RANK", what, str(TIMEOUT))


def wait_until_ready(programs: list[subprocess.Popen[str]]) -> None:
    for program in programs:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n", program.communicate()[1][-3000:]


def lose(gone: str, hosts: list[str], programs: list[subprocess.Popen[str]]) -> list[subprocess.Popen[str]]:
    """Cut the link, or kill rank 1. Returns the ranks that survive."""
    if gone == "link":
        ip("-n", hosts[0], "link", "set", "eth", "down")
        return programs
    programs[1].kill()
    programs[1].wait()
    return programs[:1]


def test_every_call(hosts: list[str]) -> None:
    with ranks(hosts, "ends") as programs:
        for program in programs:
            out, err = program.communicate(timeout=200)
            assert out.split() == ["ready", "done"], err[-3000:]


def test_the_penguins(hosts: list[str]) -> None:
    launcher = "-m torch.distributed.run --nnodes 2 --node-rank RANK --nproc-per-node 1 --master-addr 10.77.0.1"
    with running(hosts, *launcher.split(), str(PENGUINS), "--epochs", "20") as programs:
        outputs = [program.communicate(timeout=300) for program in programs]
        assert [program.returncode for program in programs] == [0, 0], outputs
    found = re.search(r"^held-out accuracy ([\d.]+), \d+ of 69 penguins on 2 ranks$", outputs[0][0], re.MULTILINE)
    assert found and float(found[1]) >= 0.95 and "held-out" not in outputs[1][0]


ALL = "among ranks 0, 1"
EXPECTED = {
    "broadcast": [f"broadcast from rank 1 {ALL}"] * 2,
    "all_gather": [f"all_gather {ALL}"] * 2,
    "all_reduce": [f"all_reduce {ALL}"] * 2,
    "gather": [f"gather to rank 0 {ALL}"] * 2,
    "scatter": ["scatter from rank 1", "scatter to rank 0"],
    "send": ["receive from rank 1", "send to rank 0"],
}


@pytest.mark.parametrize("gone", ["rank", "link"])
@pytest.mark.parametrize("call", EXPECTED)
def test_a_survivor_raises_an_error_that_names_the_call_and_the_peer(hosts: list[str], call: str, gone: str) -> None:
    with ranks(hosts, call) as programs:
        wait_until_ready(programs)
        survivors = lose(gone, hosts, programs)
        for survivor in survivors:  # all are in the call at the same time
            assert survivor.stdin is not None
            survivor.stdin.write("\n")
            survivor.stdin.flush()
        for rank, survivor in enumerate(survivors):
            out, err = survivor.communicate(timeout=10 * TIMEOUT)
            seconds, _, said = out.partition(" ")
            assert re.match(rf"\w+: rank {rank}: {EXPECTED[call][rank]}: ", said), (out, err[-2000:])
            assert float(seconds) < TIMEOUT + SLACK, out


@pytest.mark.parametrize("gone", ["rank", "link"])
def test_in_the_middle_of_many_calls(hosts: list[str], gone: str) -> None:
    with ranks(hosts, "loop") as programs:
        wait_until_ready(programs)
        time.sleep(1.5)
        survivors = lose(gone, hosts, programs)
        start = time.monotonic()
        for rank, survivor in enumerate(survivors):
            out, err = survivor.communicate(timeout=10 * TIMEOUT)
            some_call = (
                r"(broadcast from|scatter (from|to)|gather (from|to)|all_gather|.*all_reduce|receive from|send to)"
            )
            assert re.match(rf"[\d.]+ \w+: rank {rank}: {some_call} .*rank", out), (out, err[-2000:])
        assert time.monotonic() - start < TIMEOUT + SLACK


def test_what_a_killed_test_leaves_is_removed() -> None:
    code = "import os, test_two_hosts as t; print(*t.make_hosts(), flush=True); os.kill(os.getpid(), 9)"
    killed = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, check=False)
    names = killed.stdout.split()
    assert killed.returncode == -signal.SIGKILL and len(names) == 2, killed.stderr
    assert present().keys() >= {*names}
    inside = subprocess.Popen(["ip", "netns", "exec", names[0], "sleep", "100"])
    while not ip("netns", "pids", names[0]):  # a busy machine enters the namespace late
        time.sleep(0.01)
    remove_leftovers()
    assert inside.wait(timeout=10) == -signal.SIGKILL
    assert not present().keys() & {*names}
