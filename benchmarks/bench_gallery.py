"""What parts of the gallery cost beside the same parts with plain dicts, as ratios of times.

    python benchmarks/bench_gallery.py [--quick] [--rounds N] [--json PATH]

The parts are those that ``examples/plain`` writes with plain dicts. All contenders compute with one thread. In
every round they are timed right after each other.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.benchmark import Timer

from tensordict_lite import DeviceDict

sys.path.insert(0, str(Path(__file__).parent))  # a script has it there already; runpy has not
from common import interleaved, parser, ratio, ratio_table, setting, write

EXAMPLES = Path(__file__).parent.parent / "examples"
OURS, DICT = "ours", "dict"


def both(name: str) -> tuple[Any, Any]:
    """An example, and its twin with plain dicts."""
    example = importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(f"plain_{name}", EXAMPLES / "plain" / f"{name}.py")
    assert spec and spec.loader
    plain = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plain)
    return example, plain


def cases() -> dict[str, dict[str, Timer]]:
    """A statement of each contender for each part."""
    found: dict[str, dict[str, Timer]] = {}

    def case(operation: str, statement: str, ours: dict[str, Any], plain: dict[str, Any]) -> None:
        found[operation] = {OURS: Timer(statement, globals=ours), DICT: Timer(statement, globals=plain)}

    example, plain = both("classifier")
    samples = [example.Boxes(0, 32)[i] for i in range(32)]
    of = {"samples": samples}
    case("collate 32 images with boxes and strings", "f(samples)",
         {"f": example.collate_boxes, **of}, {"f": plain.collate_boxes, **of})  # fmt: skip

    example, plain = both("ppo")
    agent, carts = example.Agent(), example.CartPoles(16, torch.device("cpu"))
    rollouts = [module.collect(agent, carts, None) for module in (example, plain)]
    last = agent.value(carts.state).detach()
    whole = [module.add_advantages(rollout, last) for module, rollout in zip((example, plain), rollouts, strict=True)]
    case("collect a rollout", "f(agent, carts, rollout)",
         *({"f": module.collect, "agent": agent, "carts": carts, "rollout": rollout}
           for module, rollout in zip((example, plain), rollouts, strict=True)))  # fmt: skip
    case("add the advantages", "f(rollout, last)",
         *({"f": module.add_advantages, "rollout": rollout, "last": last}
           for module, rollout in zip((example, plain), rollouts, strict=True)))  # fmt: skip
    found["shuffled minibatches of the rollout"] = {
        OURS: Timer("for b in d.rows.flatten().rows.batches(256, shuffle=True): pass", globals={"d": whole[0]}),
        DICT: Timer("for b in p.batches(p.flatten(d), 256): pass", globals={"p": plain, "d": whole[1]}),
    }

    example, plain = both("finetune")
    rows = [{"input_ids": list(range(n)), "labels": list(range(n))} for n in range(8, 40)]
    of = {"samples": rows}
    case("collate 32 sequences of tokens, given as lists", "f(samples)",
         {"f": example.collate_training, **of}, {"f": plain.collate_training, **of})  # fmt: skip

    example, plain = both("soup")
    weights = [example.new_model().state_dict() for _ in range(4)]
    case("average 4 small models", "f(weights)",
         {"f": example.soup, "weights": [DeviceDict(one) for one in weights]},
         {"f": plain.soup, "weights": [dict(one) for one in weights]})  # fmt: skip
    return found


def main() -> None:
    args = parser("Parts of the gallery beside plain dicts, as ratios.").parse_args()
    torch.set_num_threads(1)
    sys.path.insert(0, str(EXAMPLES))
    lines: list[dict[str, Any]] = []
    for operation, seconds in interleaved(cases(), args.rounds).items():
        lines.append(
            {
                "operation": operation,
                "fields": "",
                "median_seconds": {who: median(times) for who, times in seconds.items()},
                "ratios": {DICT: ratio(seconds[OURS], seconds[DICT])},
                "met": None,
            }
        )
    print(ratio_table(lines, "ours / it", "", DICT))
    write(args.json, {**setting(), "rounds": args.rounds, "results": lines})


if __name__ == "__main__":
    main()
