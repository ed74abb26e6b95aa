"""The example that serves a model, behind a real server on the loopback."""

from __future__ import annotations

import importlib
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch import nn

pytest.importorskip("fastapi")
uvicorn: Any = pytest.importorskip("uvicorn")

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("service")


@pytest.fixture(scope="module")
def model(example: Any) -> nn.Module:
    return example.make_model()


@pytest.fixture(scope="module")
def url(example: Any, model: nn.Module) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(example.make_app(model), port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/predict"
    server.should_exit = True
    thread.join()


def ask(url: str, body: Any) -> tuple[int, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_requests_are_batched_and_answers_split(url: str) -> None:
    bodies = [{"position": [i, 1, 2], "name": "é" * i} for i in range(24)]
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda body: ask(url, body), bodies))
    for body, (status, answer) in zip(bodies, answers, strict=True):
        assert (status, answer["name"], answer["score"]) == (200, body["name"], sum(body["position"]))
    assert max(answer["batch_size"] for _, answer in answers) > 1, "several requests share a call of the model"


@pytest.mark.parametrize(("body", "said"), [
    ({"position": [1, 2], "name": "a"}, "Sample.position: expected a row of Float[Tensor, 'batch 3'], got float32[2]"),
    ({"position": [1, 2, 3], "name": "a\0"}, "'name'"),
    ({"position": [1, 2, 3]}, "Field required"),
])  # fmt: skip
def test_an_invalid_request_is_told_why(url: str, body: Any, said: str) -> None:
    status, answer = ask(url, body)
    assert status == 422 and said in answer


def test_a_wrong_request_does_not_disturb_others(url: str) -> None:
    bodies = [{"position": [i, 1, 2][: 3 - (i == 5)], "name": "a"} for i in range(16)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda body: ask(url, body), bodies))
    assert [status for status, _ in answers] == [422 if i == 5 else 200 for i in range(16)]
    assert [answer["score"] for status, answer in answers if status == 200] == [i + 3 for i in range(16) if i != 5]


def test_an_error_of_the_model_reaches_each_request_and_the_next_ones_are_served(
    url: str, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"position": [1, 2, 3], "name": "a"}

    def fail(_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch, ThreadPoolExecutor(8) as pool:
        patch.setattr(model, "forward", fail)
        statuses = [status for status, _ in pool.map(lambda _: ask(url, body), range(8))]
    assert statuses == [500] * 8
    status, answer = ask(url, body)
    assert status == 200 and answer["score"] == 6
