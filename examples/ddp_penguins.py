"""The penguins again, on several processes: the same table, model and loop, each rank with its share of the rows.

    torchrun --nproc-per-node 2 examples/ddp_penguins.py [--epochs 40] [--seed 0]

Rank 0 alone reads the file and broadcasts the table, one message whatever its columns. Every rank trains on its own
part of it under DistributedDataParallel, and the metrics of all ranks are summed as one dict.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from penguins import HERE, REQUIRED_ACCURACY, network_input, read_table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from tensordict_lite import DeviceDict, stack
from tensordict_lite.distributed import all_gather, all_reduce, broadcast


def table_of_rank_0(seed: int) -> DeviceDict:
    """The whole table on every rank, with its encoders: only rank 0 reads a file."""
    table = None
    if dist.get_rank() == 0:
        torch.manual_seed(seed)
        table = read_table(HERE / "data" / "penguins.csv")
        count = len(table.rows)
        table["training"] = torch.randperm(count) < round(0.8 * count)
        table["input"] = network_input(table)
    return broadcast(table)


def metrics_of(logits: Tensor, species: Tensor) -> DeviceDict:
    """Sums, which can be summed again: over batches and over ranks."""
    right = (logits.argmax(dim=1) == species).sum()
    loss = F.cross_entropy(logits, species, reduction="sum").detach()
    return DeviceDict({"rows": torch.full_like(loss, len(species)), "right": right.to(loss.dtype), "loss": loss})


def train(model: nn.Module, rows: DeviceDict, epochs: int) -> None:
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    samples = rows.select("input", "species").rows
    sampler: DistributedSampler[DeviceDict] = DistributedSampler(samples)
    loader = DataLoader(samples, batch_size=32, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)  # another order, the same on every rank
        seen: list[DeviceDict] = []
        for batch in loader:
            logits = parallel(batch["input"])
            optimizer.zero_grad()
            F.cross_entropy(logits, batch["species"]).backward()  # DDP averages the gradients over the ranks
            optimizer.step()
            seen.append(metrics_of(logits, batch["species"]))
        total = all_reduce(stack(seen).map(lambda values: values.sum(0)))  # one message, as all are floats
        if dist.get_rank() == 0 and (epoch + 1) % 10 == 0:
            loss, accuracy = total["loss"] / total["rows"], total["right"] / total["rows"]
            print(f"epoch {epoch + 1}: {total['rows']:.0f} rows on all ranks, loss {loss:.3f}, accuracy {accuracy:.3f}")


def run(epochs: int, seed: int) -> float:
    """Train on every rank of the default process group. Returns the accuracy on the rows that were held out."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", dist.get_node_local_rank()) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    rank = dist.get_rank()

    table = table_of_rank_0(seed).to(device)
    species = table.encoders["species"].tokens
    torch.manual_seed(seed)  # DDP starts every rank from the weights of rank 0 all the same
    model = nn.Sequential(nn.Linear(table["input"].shape[1], 32), nn.ReLU(), nn.Linear(32, len(species)))
    train(model.to(device), table.rows[table["training"]], epochs)

    # Every rank answers for its share of the rows that were held out; the shares may differ in size.
    held_out = table.rows[~table["training"]]
    share = held_out.rows[rank :: dist.get_world_size()]
    with torch.no_grad():
        logits = model(share["input"])
    total = all_reduce(metrics_of(logits, share["species"]))
    accuracy = (total["right"] / total["rows"]).item()
    answers = all_gather(share.select("species") | {"predicted": logits.argmax(dim=1)})
    if rank == 0:
        print(
            f"\nheld-out accuracy {accuracy:.3f}, {total['right']:.0f} of {total['rows']:.0f} penguins on "
            f"{len(answers)} ranks"
        )
        for other, answer in enumerate(answers):
            print(f"  rank {other}: {len(answer.rows)} penguins, the first a {answer.decode('species')[0]}")
    return accuracy


def main(run: Callable[..., float] = run) -> None:
    parser = argparse.ArgumentParser(description="Tell the species of penguins, on several processes.")
    parser.add_argument("--epochs", type=int, default=40, help="passes over the rows (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the split and the network (default: %(default)s)")
    options = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")  # torchrun has set what it needs
    accuracy = run(options.epochs, options.seed)
    gc.collect()  # objects in reference cycles hold the group, and its threads would run on at exit
    dist.barrier()
    dist.destroy_process_group()
    if accuracy < REQUIRED_ACCURACY:
        sys.exit(f"held-out accuracy {accuracy:.3f} is under the required {REQUIRED_ACCURACY}")


if __name__ == "__main__":
    main()
