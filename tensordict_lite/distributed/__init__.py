"""Send and receive whole dicts with `torch.distributed`: one buffer for all tensors, for any number of fields.

Every backend of `torch.distributed` works, such as Gloo and NCCL. The sender packs the tensors of a dict into one
buffer. A prefix of a few numbers precedes the buffer. If the schema is new on a channel, a header follows the prefix.
The header contains the tree and the layout of the buffer, so the receiver needs no schema in advance. It is JSON with a
maximum size, never pickle, and it is validated like a file.

Ranks are global ranks. ``group`` is a process group, as in `torch.distributed`: None for the default group, a subgroup,
or ``mesh.get_group()``. If the dict of one rank is invalid, every rank in the call raises an error. After an error no
rank waits for another rank, and the next call works. If a peer is lost, torch raises its own error. The message begins
with the rank and the call. The timeouts of the group apply.

Kept values that JSON cannot hold, sparse tensors and encoders without a registered JSON form cannot be sent. Gradients
do not flow through these functions.

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
