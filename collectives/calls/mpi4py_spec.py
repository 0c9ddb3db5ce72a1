"""The parts of mpi4py's buffer specifications, and items of derived types, packed."""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from operator import index
from typing import Any, NamedTuple, Self

import numpy as np
from mpi4py import MPI

from collectives.errors import InvalidBuffer, InvalidBufferType, UnknownType
from collectives.execution.memory import Items

#: Whether MPI tells the names of types: it ends a process that asks before ``MPI.Init``.
_HAS_NAMES = MPI.Is_initialized() and not MPI.Is_finalized()


def _is_whole(datatype: MPI.Datatype) -> bool:
    """Whether this MPI can use a type that mpi4py has a name for.

    Open MPI 4.1 has nothing behind ``FLOAT16_T``.  MPICH 4.0 knows its size and not its name, and
    ends the process that adds or packs it.
    """
    if not datatype.handle or datatype == MPI.DATATYPE_NULL:
        return False
    return not _HAS_NAMES or bool(datatype.name)


#: All that mpi4py names, with those that this MPI lacks.
CONSTANTS = [found for found in vars(MPI).values() if isinstance(found, MPI.Datatype)]
#: Handles of MPI's own types.
PREDEFINED = frozenset(found.handle for found in CONSTANTS if _is_whole(found))
_LACKING = frozenset(found.handle for found in CONSTANTS) - PREDEFINED
#: MPI's own types by NumPy's letters and by their names.
TYPES = {name: found for name, found in MPI._typedict.items() if found.handle in PREDEFINED}
#: MPI's types of bytes and letters, on which no arithmetic is defined.  Some libraries add them all
#: the same, as the small integers that they are not.
LETTERS = (MPI.BYTE, MPI.PACKED, MPI.CHAR, MPI.WCHAR, MPI.CHARACTER)
#: Items of one block; not every MPI library can count more.
COUNTABLE = (1 << 31) - 1


def whole_number(value: Any) -> int | None:
    """``value`` as an integer; ``None`` if it is no whole number."""
    try:
        return index(value)
    except TypeError:
        return None


def number(value: Any, role: str, what: str) -> int:
    """A number from 0 on; raises :class:`InvalidBuffer` for anything else."""
    found = whole_number(value)
    if found is None or found < 0:
        kind = InvalidBufferType if found is None else InvalidBuffer
        raise kind(f"the {role} buffer's {what} is {value!r}, not a number from 0 on")
    return found


def numbers(values: Any, role: str, what: str, blocks: int) -> tuple[int, ...]:
    """One for each block; a single number stands for all.

    Raises:
        InvalidBuffer: they are no whole numbers, or not one for each block.
    """
    one = whole_number(values)
    if one is not None:
        return (one,) * blocks
    try:
        found = tuple(index(v) for v in values)
    except TypeError:
        raise InvalidBufferType(f"the {role} buffer's {what} are no whole numbers") from None
    if len(found) != blocks:
        raise InvalidBuffer(
            f"the {role} buffer has {len(found)} {what}, but there are {blocks} ranks"
        )
    return found


def parts(spec: object, vector: bool = False) -> tuple[object, Any, Any, MPI.Datatype | str | None]:
    """The array, count, displacement and type of a specification; those of blocks if it is a
    v-variant's, where a list of two is two counts."""
    if not isinstance(spec, list | tuple):
        return spec, None, None, None
    data, *rest = spec or [None] * 5
    datatype = None
    if rest and isinstance(rest[-1], MPI.Datatype | str):
        datatype = rest.pop()
    elif len(rest) > 1 and (rest[-1] is None or not vector):
        datatype = rest.pop()  # to be inferred, or refused
    if len(rest) == 1 and isinstance(rest[0], tuple if vector else (list, tuple)):
        rest = list(rest[0]) if len(rest[0]) == 2 else rest
    if len(rest) > 2:
        raise InvalidBuffer(f"a buffer specification has 1 to 4 parts, this one has {len(spec)}")
    count, displacement = [*rest, None, None][:2]
    return data, count, displacement, datatype


def named_type(datatype: MPI.Datatype | str, role: str) -> MPI.Datatype:
    """A type of this MPI; raises :class:`InvalidBuffer` for anything else."""
    if isinstance(datatype, str):
        if datatype not in TYPES:
            raise UnknownType(f"the {role} buffer names the type {datatype!r}, which MPI has not")
        datatype = TYPES[datatype]
    if not isinstance(datatype, MPI.Datatype):
        raise InvalidBufferType(
            f"the {role} buffer's type is a {type(datatype).__name__}; pass an MPI.Datatype"
        )
    if datatype.handle in _LACKING:
        raise InvalidBuffer(f"the {role} buffer names a datatype that this MPI does not have")
    return datatype


class Block(NamedTuple):
    """``length`` items from item ``start`` of a buffer on."""

    start: int
    length: int


class Gaps:
    """Memory of the caller whose items have gaps between or inside them; packs and unpacks it.

    Args:
        keep: the object that keeps the memory alive.
        address: address of item 0.
        datatype: type of an item.
        blocks: which items are packed, one behind the other.
    """

    def __init__(
        self, keep: object, address: int, datatype: MPI.Datatype, blocks: Sequence[Block]
    ) -> None:
        self._keep = keep
        self._address = address
        self._extent = datatype.Get_extent()[1]
        self._datatype = kept_type(self, datatype)
        self._blocks = [block for block in blocks if block.length]
        self._size = datatype.Get_size()
        self._expect(self._datatype.Pack_size(1, MPI.COMM_SELF), self._size)

    @classmethod
    def at_bottom(cls, datatype: MPI.Datatype, blocks: Sequence[Block]) -> Self:
        """Items whose displacements from ``MPI.BOTTOM`` are addresses; only the caller knows what
        keeps their memory alive."""
        first, extent = datatype.Get_true_extent()[0], datatype.Get_extent()[1]
        moved = datatype.Create_hindexed([1], [-first])
        relative = moved.Create_resized(0, extent).Commit()
        made = cls(None, first, relative, blocks)
        free_types((moved, relative))
        return made

    def pack(self, packed: Items) -> None:
        """Copies the items into ``packed``, one behind the other."""
        for memory, part in self._parts(packed, readonly=True):
            self._expect(self._datatype.Pack(memory, part, 0, MPI.COMM_SELF), part.nbytes)

    def unpack(self, packed: Items) -> None:
        """Copies ``packed`` into the items; what lies in the gaps stays."""
        for memory, part in self._parts(packed, readonly=False):
            self._expect(self._datatype.Unpack(part, 0, memory, MPI.COMM_SELF), part.nbytes)

    def _parts(self, packed: Items, readonly: bool) -> Iterator[tuple[MPI.buffer, Items]]:
        """Memory of the caller's and the bytes of ``packed`` for it, as many as 31 bits count."""
        packed, at, most = packed.view(np.uint8), 0, max(1, COUNTABLE // self._size)
        for start, count in self._blocks:
            for first in range(start, start + count, most):
                items = min(most, start + count - first)
                address = self._address + first * self._extent
                memory = MPI.buffer.fromaddress(address, items * self._extent, readonly)
                yield memory, packed[at : at + items * self._size]
                at += items * self._size

    @staticmethod
    def _expect(position: int, nbytes: int) -> None:
        if position < nbytes:
            raise InvalidBuffer(
                f"this MPI packs items of {nbytes} bytes into {position}; call with "
                "algorithm='native'"
            )


def fills_its_extent(datatype: MPI.Datatype) -> bool:
    """Whether its items, one behind the other, leave no byte between them."""
    size = datatype.Get_size()
    return datatype.Get_extent() == datatype.Get_true_extent() == (0, size)


def is_in_order(datatype: MPI.Datatype) -> bool:
    """Whether the numbers of an item, and gaps behind them, lie in memory as they are sent.

    A vector within a struct is how mpi4py makes items of 2 GiB, which not every MPI can pack.
    """
    if datatype.is_predefined:
        return True
    integers, addresses, large, types = datatype.Get_contents()
    words = [*integers, *addresses, *large]
    try:
        if not all(map(is_in_order, types)):
            return False
        if datatype.combiner == MPI.COMBINER_VECTOR:
            _, length, stride = words
            return length == stride
        if datatype.combiner == MPI.COMBINER_STRUCT:
            sizes = (n * one.Get_extent()[1] for n, one in zip(words[1:], types))
            return words[1 + len(types) :] == [*accumulate(sizes, initial=0)][:-1]
        return datatype.combiner in (MPI.COMBINER_CONTIGUOUS, MPI.COMBINER_DUP)
    finally:
        free_types(one for one in types if not one.is_predefined)


def kept_type(user: object, datatype: MPI.Datatype) -> MPI.Datatype:
    """A type that lives as long as its user: the caller may free ``datatype`` before the run, and
    need not have committed it."""
    if datatype.is_predefined:
        return datatype
    kept = datatype.Dup().Commit()
    weakref.finalize(user, free_types, [kept]).atexit = False
    return kept


def free_types(types: Iterable[MPI.Datatype]) -> None:
    """Frees them while MPI is there."""
    if not MPI.Is_finalized():
        for datatype in types:
            datatype.Free()
