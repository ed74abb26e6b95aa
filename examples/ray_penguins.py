"""The penguins on Ray: the training of `ddp_penguins.py`, on processes that Ray starts on one machine or on many.

    python examples/ray_penguins.py [--workers 2] [--epochs 40] [--seed 0]

Ray Train does the part of torchrun: it starts the workers and makes their process group. Between the workers, dicts are
broadcast, reduced and gathered as before. Needs ``pip install "ray[train]"`` and a CPU or a GPU for each worker.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from penguins import HERE, REQUIRED_ACCURACY


def work(options: dict[str, Any]) -> float:
    """The whole program of one worker. Ray has made the process group."""
    from ddp_penguins import run  # noqa: PLC0415  (imported on the worker, from its copy of this folder)

    return run(options["epochs"], options["seed"])


def main() -> None:
    import ray  # noqa: PLC0415  (an optional engine)
    from ray.train import RunConfig, ScalingConfig  # noqa: PLC0415
    from ray.train.torch import TorchTrainer  # noqa: PLC0415

    parser = argparse.ArgumentParser(description="Tell the species of penguins, on the workers of Ray Train.")
    parser.add_argument("--workers", type=int, default=2, help="how many processes train (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=40, help="passes over the rows (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the split and the network (default: %(default)s)")
    options = parser.parse_args()

    # Every machine of the cluster gets this folder, with the code and the data. The driver prints what workers print.
    ray.init(runtime_env={"working_dir": str(HERE), "excludes": ["out", "notebooks"]})
    trainer = TorchTrainer(
        work,
        train_loop_config={"epochs": options.epochs, "seed": options.seed},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(storage_path=str(HERE / "out")),
    )
    accuracy = trainer.fit().return_value  # of rank 0
    print(f"held-out accuracy {accuracy:.3f} on {options.workers} workers of Ray")
    if accuracy < REQUIRED_ACCURACY:
        sys.exit(f"held-out accuracy {accuracy:.3f} is under the required {REQUIRED_ACCURACY}")


if __name__ == "__main__":
    main()
