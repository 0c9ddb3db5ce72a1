"""Buffers as mpi4py takes them, as bytes."""

from itertools import accumulate
from typing import Any

import numpy as np
from mpi4py import MPI as library


class Gapped:
    """Memory of the caller whose items have gaps; a message has its packed bytes."""

    def __init__(self, packed: Any, gaps: Any, part: slice = slice(None)) -> None:
        self._packed, self._gaps, self._part = packed, gaps, packed[part]

    def __len__(self) -> int:
        return len(self._part)

    def copy(self) -> Any:
        self._gaps.pack(self._packed)
        return self._part.copy()

    def __setitem__(self, part: slice, data: Any) -> None:
        self._gaps.pack(self._packed)  # numbers behind the message stay
        self._part[part] = data
        self._gaps.unpack(self._packed)


def memory(spec: Any, writes: bool = False) -> Any:
    """The bytes of a buffer, flat, or :class:`Gapped`; errors as of :func:`blocks`."""
    return np.empty(0, np.uint8) if spec is None else blocks(spec, 1, writes=writes)[0]


def blocks(spec: Any, number: int, form: str = "", *, writes: bool = False) -> list[Any]:
    """The bytes of each block of a collective's buffer.

    Args:
        form: how the names of mpi4py's methods end that take it: ``v``, ``w`` or neither.

    Raises:
        collectives.errors.InvalidBuffer: it is no contiguous buffer, or too short.
    """
    from collectives.calls.buffer_protocols import memory_of
    from collectives.calls.buffers import read_buffer, vector_buffer  # starts MPI

    role = "receive" if writes else "send"
    if form == "w":
        data, *where, types = spec
        counts, starts = where[0] if len(where) == 1 else where or ([1] * number, [0] * number)
        if data is not library.BOTTOM:
            data = memory_of(data, True, role, not writes, True).view(np.uint8)
        each = zip(starts, counts, types, strict=True)
        return [memory([data[at:] if at else data, *one], writes) for at, *one in each]
    if not number:
        return []
    if form:
        found = vector_buffer(spec, role, number)
    else:
        found = read_buffer(spec, role, number, moves=True)
    counts = found.counts or [found.items.size // number] * number
    starts = found.displacements or accumulate(counts, initial=0)
    parts = [slice(at, at + count) for at, count in zip(starts, counts, strict=False)]
    if found.gaps:
        return [Gapped(found.items, found.gaps, part) for part in parts]
    return [found.items[part].view(np.uint8) for part in parts]


def put(block: Any, part: Any) -> None:
    """Writes what has come for a block; NumPy would repeat one byte.

    Raises:
        mpi4py.MPI.Exception: it has another length.
    """
    if len(block) != len(part):
        raise library.Exception(library.ERR_TRUNCATE)
    block[:] = part
