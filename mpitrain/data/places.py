"""Place in a pass over a stream: its state, as a text that is read without running code."""

import math
import sys
from ast import literal_eval
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct

from mpitrain.arrays import Array

#: Key of a dictionary of one entry that stands for what is no literal; no state has it.
_KIND = b"kind"


class StreamPlace(Struct, frozen=True, forbid_unknown_fields=True):
    """Place in a pass over a stream.

    Attributes:
        epoch, position: epoch of the pass and number of the next sample.
        state: the stream's ``state_dict()`` there, as :func:`text_of` writes it.
        following: digest of the next samples.
    """

    epoch: Annotated[int, Meta(ge=0, le=2**53)]
    position: Annotated[int, Meta(ge=0, le=2**53)]
    state: str
    following: str


def text_of(state: Any) -> str:
    """Text of a state.

    Raises:
        TypeError: it has other things than numbers, texts, bytes, arrays, tensors, None, and lists,
            tuples and dictionaries of these.
    """
    return repr(_plain(state))


def state_in(text: str) -> Any:
    """The state of a text.

    Raises:
        ValueError, SyntaxError: it is no such text.
    """
    return _made(literal_eval(text))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        # A key of NumPy equals Python's number or text.
        keys = [key.item() if isinstance(key, np.generic) else key for key in value]
        return dict(zip(map(_plain, keys), map(_plain, value.values()), strict=True))
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    if type(value) is float and not math.isfinite(value):
        return {_KIND: ("float", repr(value))}
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    # A subclass, as a masked array, has more than its numbers; a type of records has names.
    if (
        type(value) is np.ndarray or isinstance(value, np.generic)
    ) and value.dtype.kind not in "OV":
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return {_KIND: (kind, value.dtype.str, value.shape, value.tobytes())}
    torch = sys.modules.get("torch")
    if torch and isinstance(value, torch.Tensor):
        return {_KIND: ("tensor", _plain(value.detach().cpu().numpy()))}
    of = f" of {value.dtype}" if hasattr(value, "dtype") else ""
    raise TypeError(f"a checkpoint keeps no {type(value).__name__}{of} in a state")


def _made(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_made, value))
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: _made(part) for key, part in value.items()}
    kind, *rest = value[_KIND]
    if kind == "float":
        return float(*rest)
    if kind == "tensor":
        return sys.modules["torch"].from_numpy(_made(*rest))
    dtype, shape, found = rest
    array: Array = np.frombuffer(found, np.dtype(dtype)).reshape(shape).copy()
    return array[()] if kind == "scalar" else array
