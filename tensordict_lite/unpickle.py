"""Names that appear in pickles and in files of ``torch.save``. This module is part of the file format.

A pickle contains the names of functions and classes, and unpickling imports them by name. So these names never change,
even if a definition moves to another module. Every other name in a pickle is public: `DeviceDict`, the encoders, the
exceptions, and your own classes.

========================= ===========================================================================================
name                      found in
========================= ===========================================================================================
``restore``               pickles of a `DeviceDict`
``restore_buffers``       pickles of a `DeviceDict` in protocol 5
``restore_field``         pickles of a `DeviceDict` in protocol 5 with a large tensor
``rebuild``               files of ``torch.save``; the only function that ``torch.load(weights_only=True)`` may call
``WrappedEncoder``        pickles of a dict with an encoder that is no `StringEncoder`
``rebuild_tokenizer``     pickles of a `Tokenizer`
``Rows``                  pickles of ``d.rows``
``Carried``, ``Policy``   pickles of the pytree structure of a dict
``TooDeep``               pickles of the exception for a dict that is nested too deep
``map_again``             messages with a field of a mapped file: the receiver maps the file too
``over_jagged``           messages with a nested tensor of a mapped file
``arrive``                messages that replace a dict that a process could not pickle
========================= ===========================================================================================

Only unpickling uses these names. Do not import them in your programs.
"""

import sys
from types import ModuleType

import torch

from ._dict.rows import Rows
from ._encoders.protocol import WrappedEncoder
from ._encoders.tokenizer import rebuild_tokenizer
from ._errors import TooDeep
from ._files.torch_save import rebuild
from ._memory.jagged import over_jagged
from ._memory.mapped import map_again
from ._tree.pickle5 import restore_buffers, restore_field
from ._tree.policy import Policy
from ._tree.pytree import Carried
from ._tree.sendable import arrive
from ._tree.tree import restore

__all__ = [
    "Carried",
    "Policy",
    "Rows",
    "TooDeep",
    "WrappedEncoder",
    "arrive",
    "map_again",
    "over_jagged",
    "rebuild",
    "rebuild_tokenizer",
    "restore",
    "restore_buffers",
    "restore_field",
]

for _name in __all__:
    globals()[_name].__module__ = __name__

# Names in files of earlier versions. These files stay readable; new files do not contain the names.
_EARLIER = {
    "tensordict_lite._tree.restore": restore,
    "tensordict_lite._saved.rebuild": rebuild,
    "tensordict_lite._strings.EncodeOnly": WrappedEncoder,
    "tensordict_lite.unpickle.EncodeOnly": WrappedEncoder,
    "tensordict_lite._tokenizer._rebuild": rebuild_tokenizer,
    "tensordict_lite._rows.Rows": Rows,
    "tensordict_lite._policy.Policy": Policy,
}
for _earlier, _found in _EARLIER.items():
    _module, _, _name = _earlier.rpartition(".")
    setattr(sys.modules.setdefault(_module, ModuleType(_module)), _name, _found)

# The only function that torch.load(weights_only=True) may call. It takes data only, and validates the data.
torch.serialization.add_safe_globals([rebuild, (rebuild, "tensordict_lite._saved.rebuild")])
