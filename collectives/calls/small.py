"""Below how many bytes whatever we did first would take longer than the MPI library's own
collective."""

import sys
from array import array
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.calls.library import library
from collectives.calls.resources import Resources
from collectives.calls.tuner import ATTACHED_BYTES, NEVER, ORDINARY, SHARED
from collectives.calls.turns import TURNS_BYTES
from collectives.contracts import contract

#: Any MPI library can count the items of smaller buffers.
_COUNTABLE = (1 << 31) - 1
#: Types of NumPy whose items are MPI's, too; a string's are its letters, and of times mpi4py
#: names a type and takes no buffer.
_CHARS = frozenset(MPI._typedict) - {"S", "U", "M", "m"}
#: Memory of Python's own.
_PYTHONS = (bytearray, bytes, memoryview, array)
#: Types of PyTorch's whose items are MPI's.
_TORCHS = frozenset(
    f"torch.{kind}"
    for kind in [
        *("float32", "float64", "complex64", "complex128", "bool"),
        *("uint8", "int8", "int16", "int32", "int64"),
    ]
)


class Limits(dict[str, int]):
    """For each collective, the bytes below which a call without ``algorithm`` is native; 0 where
    something is to be done with each call.

    A dictionary, as an all-reduce of 8 bytes takes less than ten Python calls.

    Args:
        unequal: of the v-variants: as few ranks know how long the others' blocks are, they are
            native whatever their length, or something is to be done with each call.
    """

    def __init__(self, resources: Resources, unequal: bool = False) -> None:
        self.resources = resources
        self.unequal = unequal

    def __missing__(self, collective: str) -> int:
        settings = self.resources.settings
        auto = settings.algorithm == "auto" and not settings.check and not settings.timeout
        auto = auto and not settings.needs_messages
        auto = auto and not (settings.reproducible and contract(collective).reduces)
        below = self.of_auto(collective) if auto else 0
        if self.unequal and below < NEVER:
            below = 0
        self[collective] = min(below, _COUNTABLE)
        return self[collective]

    def of_auto(self, collective: str) -> int:
        """The bytes below which ``auto`` is native.  Collective at its first use.

        No array lies in memory that the ranks share before one was asked for.
        """
        resources, settings = self.resources, self.resources.settings
        per_node, table = resources.facts
        memories = ORDINARY if resources.node is None or self.unequal else SHARED
        below = table.native_below(library(), collective, resources.comm.size, per_node, memories)
        if settings.attach and not self.unequal:
            below = min(below, ATTACHED_BYTES)
        return min(below, TURNS_BYTES) if settings.turns else below


def nbytes_of(spec: Any) -> int | None:
    """Bytes of the memory in ``array``, ``[array, type]``, ``[array, count, type]`` and the like,
    if it is NumPy's or Python's own and all types are MPI's; ``None`` for what takes longer to
    read."""
    kind = type(spec)
    if kind is np.ndarray:
        dtype = spec.dtype
        return spec.nbytes if dtype.char in _CHARS and dtype.isnative else None
    if kind in _PYTHONS:
        view = memoryview(spec)
        return view.nbytes if view.format in _CHARS else None
    if kind not in (list, tuple) or not spec:
        return _nbytes_of_tensor(spec)
    items, last = spec[0], spec[-1]
    if isinstance(last, MPI.Datatype):
        if last == MPI.DATATYPE_NULL or not last.is_predefined:
            return None
    elif isinstance(last, str):
        return None
    return None if type(items) in (list, tuple) else nbytes_of(items)


def _nbytes_of_tensor(tensor: Any) -> int | None:
    """Of a tensor of PyTorch's that mpi4py reads, too."""
    torch = sys.modules.get("torch")
    if torch is None or type(tensor) is not torch.Tensor or str(tensor.dtype) not in _TORCHS:
        return None
    plain = tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.requires_grad
    return int(tensor.nbytes) if plain else None
