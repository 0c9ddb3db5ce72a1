"""mpi4py's buffer specifications, read into flat NumPy arrays."""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI
from mpi4py.util import dtlib

from collectives import extras
from collectives.calls.buffer_protocols import memory_of
from collectives.calls.mpi4py_spec import (
    TYPES,
    Block,
    Gaps,
    fills_its_extent,
    is_in_order,
    named_type,
    number,
    numbers,
    parts,
    whole_number,
)
from collectives.errors import InvalidBuffer
from collectives.execution.memory import HOST, Memory, gpu_of, is_on_device

#: The type of items that only the MPI library can reduce: those of derived types.
OPAQUE = np.dtype("V0")


@dataclass(frozen=True)
class CallBuffer:
    """Memory as MPI sees it: ``items.size`` items of one type.

    Attributes:
        items: contiguous 1-D view of the caller's memory, NumPy's or CuPy's; where there are
            ``gaps``, memory of our own that they are packed into; without memory if ``OPAQUE``.
        datatype: the MPI type of an item, named by the caller or inferred; ``None`` where this MPI
            has none (float16, bfloat16 on some).
        counts: items of the blocks of a v-variant; ``None`` if all are equal.
        displacements: where these blocks begin; ``None`` if they lie one behind the other.
        gaps: how the caller's memory is packed into ``items``; ``None`` if ``items`` is it.
        writable: whether the collective may write to it.
    """

    items: npt.NDArray[Any]
    datatype: MPI.Datatype | None
    counts: tuple[int, ...] | None = None
    displacements: tuple[int, ...] | None = None
    gaps: Gaps | None = None
    writable: bool = True

    @cached_property
    def address(self) -> int:
        return self.memory.address(self.items)

    @cached_property
    def memory(self) -> Memory:
        """Where it lies, as this call addresses it; plans queue their work on their
        communicator's (:meth:`~collectives.calls.devices.Devices.memory`)."""
        return HOST if self.gpu is None else extras.CudaMemory(self.gpu)

    @property
    def gpu(self) -> int | None:
        """The number of the GPU that it lies on; ``None`` on the host."""
        return gpu_of(self.items)

    def spans(self) -> list[tuple[int, int]]:
        """First address and the one behind the last, of each part of the caller's memory."""
        if self.gaps is not None:
            return []  # packed before anything is stored to it
        first, size = self.address, self.items.itemsize
        blocks = [(0, self.items.size)]
        if self.displacements is not None:
            blocks = [*zip(self.displacements, self.counts or ())]
        return [(first + start * size, first + (start + n) * size) for start, n in blocks if n]

    def blocks(self, borrow: bool) -> list[npt.NDArray[Any]]:
        """Views of the blocks, where there are gaps between them; ``borrow`` as of :meth:`view`."""
        pairs = zip(self.displacements or (), self.counts or ())
        items = self.view(borrow)
        return [items[start : start + count] for start, count in pairs]

    def view(self, borrow: bool) -> npt.NDArray[Any]:
        """``items``, or their memory without keeping it alive."""
        return self.memory.borrowed(self.items) if borrow and self.gaps is None else self.items

    def in_units(self, nbytes: int) -> "CallBuffer":
        """This memory as items of ``nbytes`` each, for collectives that only move data.

        Ranks may describe the same bytes by different types, and must cut them at the same places.
        """
        size = self.items.itemsize
        return replace(
            self,
            # By bytes: NumPy cuts items of 3 bytes into no others.
            items=self.items.view(np.uint8).view(np.dtype(f"u{nbytes}")),
            counts=_scaled(self.counts, size, nbytes),
            displacements=_scaled(self.displacements, size, nbytes),
        )

    def of_type(self, datatype: MPI.Datatype) -> list[Any]:
        """mpi4py's specification of this memory as items of ``datatype``, without gaps."""
        nbytes, size = self.items.view(np.uint8), self.items.itemsize
        if self.counts is None:
            return [nbytes, datatype]
        if len(self.counts) == 1:  # the one block of a rank that is not the root
            (start,) = self.displacements or (0,)
            return [nbytes[start * size :][: self.counts[0] * size], datatype]
        scaled = (_scaled(n, size, datatype.extent) for n in (self.counts, self.displacements))
        return [nbytes, *scaled, datatype]


def read_buffer(
    spec: object, role: str, blocks: int = 1, *, moves: bool = False, readonly: bool = False
) -> CallBuffer:
    """Reads ``array``, ``[array, type]``, ``[array, count]``, ``[array, count, type]``,
    ``[array, (count, displ), type]`` or ``[array, count, displ, type]``.

    An array is whatever mpi4py takes: with the buffer protocol, DLPack or CUDA's array interface.

    Args:
        role: ``"send"`` or ``"receive"``, for messages; a receive buffer must be writable.
        blocks: blocks that the collective puts into this buffer; as in mpi4py, a given count is
            that of one block, and displacements are in items.
        moves: the collective only moves data, so items of derived types are packed.
        readonly: a receive buffer that this rank only reads, as the root of a broadcast does.

    Raises:
        InvalidBuffer: the memory is not contiguous, not writable, too short, or of a kind that
            nobody can read.
    """
    data, count, displacement, named = parts(spec)
    readonly = readonly or role == "send"
    space = _Space(data, named, role, readonly=readonly, moves=moves)
    start = number(displacement or 0, role, "displacement")
    length = space.whole_items(start) if count is None else number(count, role, "count") * blocks
    if length % blocks:
        raise InvalidBuffer(
            f"the {role} buffer of {length} items cannot be cut into {blocks} equal blocks, one "
            "for each rank"
        )
    return space.buffer([Block(start, length)])


def vector_buffer(spec: object, role: str, blocks: int) -> CallBuffer:
    """Reads ``[array, counts]``, ``[array, (counts, displacements)]``, with a type behind, or
    ``[array, counts, displacements, type]``, as mpi4py's v-variants take them.

    Counts and displacements are in items.  A single number is the count of every block, or the
    distance of one block from the next.  Without counts, the blocks are as equal as can be, the
    first ones longer by one; without displacements, they lie one behind the other.

    Raises:
        InvalidBuffer: as :func:`read_buffer`, or a list is not ``blocks`` long.
    """
    data, lengths, starts, named = parts(spec, vector=True)
    space = _Space(data, named, role, readonly=role == "send", moves=True)
    if lengths is None:
        length, longer = divmod(space.whole_items(0), blocks)
        counts = tuple(length + (j < longer) for j in range(blocks))
    else:
        counts = numbers(lengths, role, "counts", blocks)
    stride = whole_number(starts)
    if starts is None:
        displacements = tuple(accumulate(counts[:-1], initial=0))
    elif stride is not None:
        displacements = tuple(stride * j for j in range(blocks))
    else:
        displacements = numbers(starts, role, "displacements", blocks)
    return space.buffer([*map(Block, displacements, counts)], counts)


class _Space:
    """The memory that a specification names, before it is known which items of it are meant.

    Attributes:
        datatype: the MPI type of an item, as in :class:`CallBuffer`.
    """

    def __init__(
        self,
        data: object,
        named: MPI.Datatype | str | None,
        role: str,
        *,
        readonly: bool,
        moves: bool,
    ) -> None:
        self.role = role
        self.writable = not readonly
        self.memory = memory_of(data, named is not None, role, readonly, moves)
        self.datatype = _inferred(self.memory.dtype)
        self.dtype = self.memory.dtype
        self.extent = self.memory.itemsize
        self.gapped = self.is_opaque = self.is_packed = False
        #: Items of a type without bytes are nothing, however many there are.
        self.is_of_nothing = False
        if named is not None:
            self.datatype = datatype = named_type(named, role)
            size, self.extent = datatype.Get_size(), datatype.Get_extent()[1]
            self.is_of_nothing = moves and not size
            self.is_opaque = not (moves or datatype.is_predefined)
            # In a reduction, nobody looks at the gaps of the pair types of MAXLOC.
            self.gapped = (moves or self.is_opaque) and not fills_its_extent(datatype)
            self.is_packed = moves and bool(size) and (self.gapped or not is_in_order(datatype))
            if not datatype.is_predefined:
                self.dtype = np.dtype(np.uint8)
            elif not self.is_packed:
                self.dtype = _dtype(datatype, self.extent)
            if self.is_packed and (is_on_device(self.memory) or self.extent <= 0):
                raise InvalidBuffer(
                    f"the {role} buffer's datatype is derived (extent {self.extent}, size {size} "
                    "bytes); pack it first, or call with algorithm='native'"
                )
        #: Its type says where in this process's memory the items are.
        self.at_bottom = self.is_packed and data is MPI.BOTTOM

    def whole_items(self, start: int) -> int:
        """How many items there are from item ``start`` on."""
        nbytes = self.memory.nbytes - start * self.extent
        if nbytes < 0 or nbytes % max(self.extent, 1):
            raise InvalidBuffer(
                f"the {self.role} buffer of {self.memory.nbytes} bytes is no whole number of "
                f"items of {self.extent} bytes from item {start} on; name a count"
            )
        return nbytes // max(self.extent, 1)

    def buffer(self, blocks: list[Block], counts: tuple[int, ...] | None = None) -> CallBuffer:
        """These items; ``counts`` are those of a v-variant."""
        if self.is_of_nothing:
            return CallBuffer(self.memory.view(np.uint8)[:0], MPI.BYTE, _scaled(counts, 0))
        for j, (start, count) in enumerate(blocks):
            asked = f"{count} were asked for" if counts is None else f"block {j} is {count} items"
            self._expect(start, count, f"{asked} from item {start} on" if start else asked)
        if self.is_opaque:
            return CallBuffer(np.empty(blocks[0].length, OPAQUE), self.datatype)
        if self.is_packed:
            return self._packed(blocks, counts)
        starts, lengths = zip(*blocks)
        first, length = starts[0] if lengths[0] else 0, sum(lengths)
        behind = accumulate(lengths[:-1], initial=first)
        displacements = None
        if any(n and d != p for d, p, n in zip(starts, behind, lengths)):
            first, length, displacements = 0, self.memory.nbytes // self.extent, starts
        items = self.memory
        if self.dtype is not items.dtype or length * self.extent != items.nbytes:
            part = items.view(np.uint8)[first * self.extent : (first + length) * self.extent]
            items = part.view(self.dtype)
        counts = _scaled(counts, self.extent, items.itemsize)
        displacements = _scaled(displacements, self.extent, items.itemsize)
        return CallBuffer(items, self.datatype, counts, displacements, writable=self.writable)

    def _packed(self, blocks: list[Block], counts: tuple[int, ...] | None) -> CallBuffer:
        assert self.datatype is not None, "it was named"
        size = self.datatype.Get_size()
        packed = np.empty(sum(count for _, count in blocks) * size, np.uint8)
        if self.at_bottom:
            gaps = Gaps.at_bottom(self.datatype, blocks)
        else:
            gaps = Gaps(self.memory, HOST.address(self.memory), self.datatype, blocks)
        lengths = _scaled(counts, size)
        return CallBuffer(packed, self.datatype, lengths, None, gaps, self.writable)

    def _expect(self, start: int, count: int, asked: str) -> None:
        if not count:
            return
        if self.gapped and count > 0:
            return  # the caller's word, as of mpi4py: the address may be that of a part of an array
        first, end = start * self.extent, (start + count) * self.extent
        if count < 0 or first < 0 or end > self.memory.nbytes:
            raise InvalidBuffer(
                f"the {self.role} buffer holds {self.memory.nbytes // max(self.extent, 1)} items, "
                f"but {asked}"
            )


def _scaled(numbers: tuple[int, ...] | None, by: int, unit: int = 1) -> tuple[int, ...] | None:
    return None if numbers is None else tuple(n * by // unit for n in numbers)


def _inferred(dtype: "np.dtype[Any]") -> MPI.Datatype | None:
    """The MPI type of a NumPy type, if there is one."""
    if dtype.isbuiltin == 2:
        return None  # ml_dtypes has given its types letters that mean other types to MPI
    if not dtype.isnative or dtype.kind in "mM" or (dtype.kind in "SU" and dtype.str[2:] != "1"):
        return None  # mpi4py takes no times, and of longer strings, MPI knows a letter's type
    return TYPES.get(dtype.char)


def _dtype(datatype: MPI.Datatype, extent: int) -> "np.dtype[Any]":
    """NumPy's type of items of one of MPI's own types, or as many bytes where it has none."""
    try:
        dtype = np.dtype(dtlib.to_numpy_dtype(datatype))
    except (ValueError, TypeError):
        dtype = np.dtype((np.void, extent))
    # Only the operation knows items of several numbers.
    several = dtype.subdtype is not None or dtype.names is not None
    return np.dtype((np.void, extent)) if several or dtype.itemsize != extent else dtype
