"""Whole dicts over `torch.distributed`: one message for the tensors of a dict, whatever the number of its fields.

Gloo, NCCL and whatever else `torch.distributed` runs on do the work; this is how a dict crosses them. Its tensors are
packed into one buffer. A few numbers go ahead of it and, when a schema is new on a channel, a header that says
what lies where: JSON, bounded, and checked as a file is, never pickle. So a receiver needs to know nothing.

Ranks are global ranks and ``group`` is a process group, as in `torch.distributed`: None for the default one, a
sub-group, or ``mesh.get_group()``. What one rank has against its own dict is raised on every rank that takes part.
After an error every rank is in step: none waits for another, and the next call works. A peer that is gone is torch's
own error, with the rank and the call in front, and timeouts are those of the group. Kept objects, sparse tensors and
encoders without a registered form cannot be sent; gradients do not flow.

>>> import tempfile
>>> import torch.distributed as dist
>>> from tensordict_lite import DeviceDict
>>> from tensordict_lite.distributed import all_gather, all_reduce, broadcast, scatter
>>> dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)  # torchrun's part
>>> batch = DeviceDict({"x": [1.0, 2.0], "name": ["Ada", "Bo"]})
>>> broadcast(batch).decode("name"), scatter(batch)["x"].tolist(), len(all_gather(batch))
(['Ada', 'Bo'], [1.0, 2.0], 1)
>>> all_reduce(batch.select("x"), op="mean")["x"]
tensor([1., 2.])
>>> dist.destroy_process_group()
"""

from .channel import Work
from .verbs import all_gather, all_reduce, broadcast, gather, irecv, isend, recv, scatter, send

__all__ = ["Work", "all_gather", "all_reduce", "broadcast", "gather", "irecv", "isend", "recv", "scatter", "send"]
