"""What the programs of the gallery cost beside the same programs with plain dicts, as ratios of times.

    python benchmarks/bench_gallery.py [--quick] [--rounds N] [--only TEXT] [--json PATH]

The programs are ``run`` of ``examples/NAME.py`` and of ``examples/plain_NAME.py``, after imports. Both must return the
same result. All contenders compute with one thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import io
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from harness import DICT, OURS, Case, Prepare, Run, folder, main, statement, two_ranks

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))
CPU = torch.device("cpu")
# The arguments of `run`: small enough for many rounds. They may name files in an empty folder.
PROGRAMS: dict[str, Callable[[Path], tuple[Any, ...]]] = {
    "classifier": lambda _: (128, 1, 2, CPU),
    "ppo": lambda _: (2, CPU),
    "finetune": lambda _: (10, CPU),
    "packed": lambda _: (1, CPU),
    "checkpoint": lambda empty: (empty / "checkpoint.pt", "cpu"),
    "soup": lambda _: (2,),
    "rows": lambda _: (2_000_000, 100, 2),
    "table": lambda empty: (empty / "stripes", 5000, 128, 2),
    "typed": lambda _: (512, 6),
    "penguins": lambda _: (20, 0),
}
RANKS, RANK_ARGUMENTS = "ddp_penguins", (10, 0)


def program(name: str, *arguments: Any) -> tuple[Any, float]:
    """What ``run`` of a program returns, and its seconds. What it prints is dropped."""
    run = importlib.import_module(name).run
    gc.collect()  # what the run before has left
    if dist.is_initialized():
        dist.barrier()
    with contextlib.redirect_stdout(io.StringIO()):
        start = perf_counter()
        result = run(*arguments)
        return result, perf_counter() - start


def alone(name: str, arguments_in: Callable[[Path], tuple[Any, ...]]) -> tuple[Any, float]:
    """Run a program in this process, with an empty folder."""
    empty = folder() / "empty"
    shutil.rmtree(empty, ignore_errors=True)
    empty.mkdir()
    return program(name, *arguments_in(empty))


def on_ranks(name: str) -> tuple[Any, float]:
    """Run a program in two processes. The answer is that of rank 0."""
    return two_ranks().ask(program, name, *RANK_ARGUMENTS)[0]


def program_case(name: str, run: Callable[[str], tuple[Any, float]]) -> Case:
    def contender(of: str) -> Prepare:
        return lambda _: Run(lambda: run(of)[0], lambda: run(of)[1])

    return Case(name, "program", {DICT: contender(f"plain_{name}"), OURS: contender(name)})


def plain_answers(model: Any, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`answers` of the service, with plain dicts."""
    for i, request in enumerate(requests):
        if len(request["position"]) != 3:
            raise ValueError(f"request {i}: position has {len(request['position'])} numbers, not 3")
        if "\0" in request["name"]:
            raise ValueError(f"request {i}: the name {request['name']!r} has a NUL character")
    with torch.inference_mode():
        scores = model(torch.tensor([request["position"] for request in requests])).squeeze(1).tolist()
    return [
        {"name": request["name"], "score": score, "batch_size": len(requests)}
        for request, score in zip(requests, scores, strict=True)
    ]


def service_case(count: int) -> Case:
    """The service without its server: what it does with requests that pydantic has parsed."""
    service = importlib.import_module("service")
    service.WAIT = 0
    model, loop = service.make_model(), asyncio.new_event_loop()
    requests = [service.Request(position=[i, 1, 2], name=f"request {i}") for i in range(count)]

    async def serve(answers: Any) -> list[Any]:
        batcher = service.Batcher(model, answers)
        task = asyncio.create_task(batcher.run())
        found = await asyncio.gather(*(batcher.ask(request.model_dump()) for request in requests))
        task.cancel()
        return found

    def contender(answers: Any) -> Prepare:
        return statement("loop.run_until_complete(serve(answers))", loop=loop, serve=serve, answers=answers)

    contenders = {DICT: contender(plain_answers), OURS: contender(service.answers)}
    return Case(f"answer {count} requests of the service", "part", contenders)


def cases() -> list[Case]:
    return [
        service_case(8),
        *(program_case(name, partial(alone, arguments_in=of)) for name, of in PROGRAMS.items()),
        program_case(RANKS, on_ranks),
    ]


if __name__ == "__main__":
    main(__doc__, cases)
