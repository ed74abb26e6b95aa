"""Names that appear in pickles and in files of ``torch.save``. This module is part of the file format.

A pickle contains the names of functions and classes, and unpickling imports them by name. So these names never change,
even if a definition moves to another module. Every other name in a pickle is public: `DeviceDict`, the encoders, the
exceptions, and your own classes.

========================= ===========================================================================================
name                      found in
========================= ===========================================================================================
``rebuild``               pickles of a `DeviceDict`, and files of ``torch.save``
``rebuild_ragged``,       pickles of a `Ragged` outside of a dict, and files of ``torch.save``
``rebuild_lengths``
``rebuild_tensor``        pickles of a `DeviceDict` in protocol 5 with a large tensor
``WrappedEncoder``        pickles of a dict with an encoder that is no `StringEncoder`
``rebuild_tokenizer``     pickles of a `Tokenizer`
``Rows``                  pickles of ``d.rows``
``Carried``, ``Policy``   pickles of the pytree structure of a dict
``TooDeep``               pickles of the exception for a dict that is nested too deep
``map_again``             messages with a field of a mapped file: the receiver maps the file too
``Unsent``                messages that replace a dict that a process could not pickle
========================= ===========================================================================================

Only unpickling uses these names. Do not import them in your programs.
"""

from torch.serialization import add_safe_globals

from ._dict.rows import Rows
from ._encoders.protocol import WrappedEncoder
from ._encoders.tokenizer import rebuild_tokenizer
from ._errors import TooDeep
from ._memory.mapped import map_again
from ._tree.encoding import rebuild, rebuild_tensor
from ._tree.policy import Policy
from ._tree.pytree import Carried
from ._tree.ragged import rebuild_lengths, rebuild_ragged
from ._tree.sendable import Unsent

__all__ = [
    "Carried",
    "Policy",
    "Rows",
    "TooDeep",
    "Unsent",
    "WrappedEncoder",
    "map_again",
    "rebuild",
    "rebuild_lengths",
    "rebuild_ragged",
    "rebuild_tensor",
    "rebuild_tokenizer",
]

for _name in __all__:
    globals()[_name].__module__ = __name__

# The only functions that torch.load(weights_only=True) may call. They take data only, and validate the data.
add_safe_globals([rebuild, rebuild_lengths, rebuild_ragged])
