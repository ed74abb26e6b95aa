"""A web service: it validates all requests that wait at once, and runs the model once for all of them.

    pip install fastapi uvicorn
    python examples/service.py [--port 8000]
    curl -H "content-type: application/json" -d '{"position": [1, 2, 3], "name": "a"}' http://127.0.0.1:8000/predict

FastAPI and pydantic know the JSON. `Sample` knows dtypes and shapes: it is the class of a request and of a batch.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any

import torch
from fastapi import FastAPI, HTTPException
from jaxtyping import Float
from pydantic import BaseModel
from torch import Tensor, nn

from tensordict_lite import TypedDeviceDict, Utf8, collate

LARGEST_BATCH = 32
WAIT = 0.005  # seconds to wait for more requests
Answers = Callable[[nn.Module, list[dict[str, Any]]], list[dict[str, Any] | Exception]]


class Request(BaseModel):
    position: list[float]
    name: str


class Sample(TypedDeviceDict):
    position: Float[Tensor, "batch 3"]
    name: Annotated[Tensor, Utf8()]


def answers(model: nn.Module, requests: list[dict[str, Any]]) -> list[dict[str, Any] | Exception]:
    """The answer to each request, or its error. One call of `collate` validates all requests."""
    try:
        batch = collate(requests, cls=Sample)
    except (TypeError, ValueError) as error:  # such as two coordinates: the message names the field
        if len(requests) == 1:
            return [HTTPException(422, str(error))]
        return [answer for request in requests for answer in answers(model, [request])]  # only the wrong ones fail
    with torch.inference_mode():
        scores = model(batch.position).squeeze(1).tolist()
    return [
        {"name": request["name"], "score": score, "batch_size": len(requests)}
        for request, score in zip(requests, scores, strict=True)
    ]


class Batcher:
    """Collects requests, answers a batch of them at once, and gives each caller its own answer."""

    def __init__(self, model: nn.Module, answers: Answers) -> None:
        self.model, self.answers = model, answers
        self.waiting: asyncio.Queue[tuple[dict[str, Any], asyncio.Future[dict[str, Any]]]] = asyncio.Queue()

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        await self.waiting.put((request, answer))
        return await answer

    async def run(self) -> None:
        while True:
            taken = [await self.waiting.get()]
            await asyncio.sleep(WAIT)
            while len(taken) < LARGEST_BATCH and not self.waiting.empty():
                taken.append(self.waiting.get_nowait())
            results: list[dict[str, Any] | Exception]
            try:
                results = self.answers(self.model, [request for request, _ in taken])
            except Exception as error:  # each request of the batch gets the error, and the next batch is served
                results = [error] * len(taken)
            for (_, answer), result in zip(taken, results, strict=True):
                if answer.done():  # the client may have left
                    continue
                if isinstance(result, Exception):
                    answer.set_exception(result)
                else:
                    answer.set_result(result)


def make_app(model: nn.Module) -> FastAPI:
    batcher = Batcher(model, answers)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        task = asyncio.create_task(batcher.run())
        yield
        task.cancel()

    app = FastAPI(lifespan=lifespan)

    async def predict(request: Request) -> dict[str, Any]:
        return await batcher.ask(request.model_dump())

    app.post("/predict")(predict)
    return app


def make_model() -> nn.Module:
    """A model whose answer is the sum of the coordinates, so that it can be checked."""
    model = nn.Linear(3, 1)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def main() -> None:
    import uvicorn  # noqa: PLC0415  (the test has a server of its own)

    parser = argparse.ArgumentParser(description="Serve a model.")
    parser.add_argument("--port", type=int, default=8000)
    uvicorn.run(make_app(make_model()), host="127.0.0.1", port=parser.parse_args().port)


if __name__ == "__main__":
    main()
