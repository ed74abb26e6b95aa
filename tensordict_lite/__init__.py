"""One typed container, `DeviceDict`: a real dict whose tensors all live on one device."""

from ._collate import collate
from ._device_dict import DeviceDict
from ._encoders import Hashing, Utf8, Vocabulary
from ._errors import DeviceMismatchError, InvalidFileError
from ._io import load, save
from ._join import cat, stack
from ._missing import MissingKeyError
from ._plain import to_device, to_numpy
from ._prefetch import prefetch
from ._strings import StringEncoder, encoder_from_json, encoder_to_json, register_encoder
from ._tokenizer import Tokenizer
from ._typed import TypedDeviceDict

__all__ = [
    # the container
    "DeviceDict",
    "TypedDeviceDict",
    "DeviceMismatchError",
    "MissingKeyError",
    # batches
    "stack",
    "cat",
    "collate",
    "prefetch",
    # files
    "save",
    "load",
    "InvalidFileError",
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

# Public classes are pickled, shown and documented under the public name, whatever room they live in.
for _public in (
    DeviceDict,
    DeviceMismatchError,
    InvalidFileError,
    MissingKeyError,
    Hashing,
    Tokenizer,
    Utf8,
    Vocabulary,
    prefetch,
):
    _public.__module__ = __name__
del _public
