"""The same program as `ddp_penguins.py`, with plain dicts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from ddp_penguins import main
from penguins import HERE
from plain_penguins import network_input, read_table, take, to_device
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

Columns = dict[str, Tensor]


def table_of_rank_0(seed: int) -> tuple[dict[str, Any], dict[str, list[str]]]:
    sent: list[Any] = [None]
    if dist.get_rank() == 0:
        torch.manual_seed(seed)
        table, names = read_table(HERE / "data" / "penguins.csv")
        count = len(table["species"])
        table["training"] = torch.randperm(count) < round(0.8 * count)
        table["input"] = network_input(table, names)
        sent = [(table, names)]
    dist.broadcast_object_list(sent)
    return sent[0]


class Samples(Dataset[Columns]):
    def __init__(self, columns: Columns) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns["species"])

    def __getitems__(self, indices: list[int]) -> Columns:
        return take(self.columns, torch.tensor(indices, device=self.columns["species"].device))


def as_it_is(batch: Columns) -> Columns:
    return batch


def metrics_of(logits: Tensor, species: Tensor) -> Columns:
    right = (logits.argmax(dim=1) == species).sum()
    loss = F.cross_entropy(logits, species, reduction="sum").detach()
    return {"rows": torch.full_like(loss, len(species)), "right": right.to(loss.dtype), "loss": loss}


def all_reduced(metrics: Columns) -> Columns:
    """Sum each metric over all ranks, with one message for all metrics."""
    sums = torch.stack(list(metrics.values()))
    dist.all_reduce(sums)
    return dict(zip(metrics, sums.unbind(), strict=True))


def train(model: nn.Module, rows: Columns, epochs: int) -> None:
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    samples = Samples(rows)
    sampler: DistributedSampler[Columns] = DistributedSampler(samples)
    loader = DataLoader(samples, batch_size=32, sampler=sampler, collate_fn=as_it_is)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        seen: list[Columns] = []
        for batch in loader:
            logits = parallel(batch["input"])
            optimizer.zero_grad()
            F.cross_entropy(logits, batch["species"]).backward()
            optimizer.step()
            seen.append(metrics_of(logits, batch["species"]))
        total = all_reduced({key: torch.stack([metrics[key] for metrics in seen]).sum(0) for key in seen[0]})
        if dist.get_rank() == 0 and (epoch + 1) % 10 == 0:
            loss, accuracy = total["loss"] / total["rows"], total["right"] / total["rows"]
            print(f"epoch {epoch + 1}: {total['rows']:.0f} rows on all ranks, loss {loss:.3f}, accuracy {accuracy:.3f}")


def run(epochs: int, seed: int) -> float:
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", dist.get_node_local_rank()) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    rank = dist.get_rank()

    host_table, names = table_of_rank_0(seed)
    table = to_device(host_table, device)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(table["input"].shape[1], 32), nn.ReLU(), nn.Linear(32, len(names["species"])))
    used = {key: table[key] for key in ("input", "species")}
    train(model.to(device), take(used, table["training"].nonzero().squeeze(1)), epochs)

    held_out = take(used, (~table["training"]).nonzero().squeeze(1))
    share = {key: value[rank :: dist.get_world_size()] for key, value in held_out.items()}
    with torch.no_grad():
        logits = model(share["input"])
    total = all_reduced(metrics_of(logits, share["species"]))
    accuracy = (total["right"] / total["rows"]).item()
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, {"species": share["species"].cpu(), "predicted": logits.argmax(dim=1).cpu()})
    if rank == 0:
        print(
            f"\nheld-out accuracy {accuracy:.3f}, {total['right']:.0f} of {total['rows']:.0f} penguins on "
            f"{len(answers)} ranks"
        )
        for other, answer in enumerate(answers):
            first = names["species"][answer["species"][0]]
            print(f"  rank {other}: {len(answer['species'])} penguins, the first a {first}")
    return accuracy


if __name__ == "__main__":
    main(run)
