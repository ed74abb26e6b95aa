"""`DeviceDict`: a dict whose tensors all live on one device."""

from . import unpickle as unpickle  # pickles and files of `torch.save` call functions of this module
from ._batch.collate import collate
from ._batch.containers import to_device, to_numpy
from ._batch.join import cat, stack
from ._batch.joined_rows import JoinedRows
from ._batch.order import BatchOrder
from ._batch.pad import Pad
from ._batch.prefetch import prefetch
from ._dict.device_dict import DeviceDict
from ._dict.io import load, save
from ._dict.schema import field
from ._dict.typed import TypedDeviceDict
from ._encoders.builtin import Hashing, Utf8, Vocabulary
from ._encoders.protocol import StringEncoder, encoder_from_json, encoder_to_json, register_encoder
from ._encoders.tokenizer import Tokenizer
from ._errors import DeviceMismatchError, InvalidFileError
from ._tree.encoding import view_read_only
from ._tree.missing import MissingKeyError
from ._tree.ragged import Ragged

__version__ = "1.0.0.dev0"  # the build reads the version of the package here

__all__ = [
    # the container
    "DeviceDict",
    "TypedDeviceDict",
    "field",
    "Ragged",
    "DeviceMismatchError",
    "MissingKeyError",
    # batches
    "stack",
    "cat",
    "collate",
    "Pad",
    "prefetch",
    "BatchOrder",
    # files
    "save",
    "load",
    "JoinedRows",
    "InvalidFileError",
    # between processes
    "view_read_only",
    # plain containers
    "to_device",
    "to_numpy",
    # strings
    "StringEncoder",
    "Utf8",
    "Vocabulary",
    "Hashing",
    "Tokenizer",
    "encoder_to_json",
    "encoder_from_json",
    "register_encoder",
]

# Pickles, error messages and documentation show the public name instead of a private module.
for _public in __all__:
    globals()[_public].__module__ = __name__
