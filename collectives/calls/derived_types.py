"""Items with gaps between or inside them, as MPI's derived types have, packed and unpacked."""

import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

from mpi4py import MPI

from collectives.errors import InvalidBuffer
from collectives.execution.memory import Items


class Block(NamedTuple):
    """``length`` items from item ``start`` of a buffer on."""

    start: int
    length: int


class Gaps:
    """The caller's memory, whose items have gaps between or inside them, and how it is packed.

    Args:
        keep: what keeps the memory alive.
        address: address of item 0.
        datatype: type of an item; duplicated, as the caller may free it before the collective runs.
        blocks: which items are packed, one behind the other.
    """

    def __init__(
        self, keep: object, address: int, datatype: MPI.Datatype, blocks: Sequence[Block]
    ) -> None:
        self._keep = keep
        self._address = address
        self._extent = datatype.Get_extent()[1]
        self._datatype = datatype.Dup()
        self._blocks = [block for block in blocks if block.length]
        weakref.finalize(self, free_types, [self._datatype]).atexit = False

    @classmethod
    def at_bottom(cls, datatype: MPI.Datatype, blocks: Sequence[Block]) -> Self:
        """Of ``MPI.BOTTOM``, from which the type's displacements are addresses; nobody can tell
        what keeps the memory there alive but the caller."""
        first, extent = datatype.Get_true_extent()[0], datatype.Get_extent()[1]
        moved = datatype.Create_hindexed([1], [-first])
        relative = moved.Create_resized(0, extent).Commit()
        made = cls(None, first, relative, blocks)
        free_types((moved, relative))
        return made

    def pack(self, packed: Items) -> None:
        """Copies the items into ``packed``, bytes without gaps."""
        position = 0
        for memory in self._memories(readonly=True):
            position = self._datatype.Pack(memory, packed, position, MPI.COMM_SELF)
        self._expect(position, packed)

    def unpack(self, packed: Items) -> None:
        """Copies ``packed`` into the items; what lies in the gaps stays."""
        position = 0
        for memory in self._memories(readonly=False):
            position = self._datatype.Unpack(packed, position, memory, MPI.COMM_SELF)
        self._expect(position, packed)

    def _memories(self, readonly: bool) -> list[MPI.buffer]:
        return [
            MPI.buffer.fromaddress(
                self._address + start * self._extent, count * self._extent, readonly
            )
            for start, count in self._blocks
        ]

    def _expect(self, position: int, packed: Items) -> None:
        if position != packed.nbytes:
            raise InvalidBuffer(
                f"this MPI packs items of {packed.nbytes} bytes into {position}; call with "
                "algorithm='native'"
            )


def fills_its_extent(datatype: MPI.Datatype) -> bool:
    """Whether its items, one behind the other, leave no byte between them."""
    size = datatype.Get_size()
    return datatype.Get_extent() == datatype.Get_true_extent() == (0, size)


def is_one_block(datatype: MPI.Datatype) -> bool:
    """Whether its numbers are known to lie one behind the other, in this order.

    A type may fill its extent and have them in another order, as the one of a transposed matrix
    does.
    """
    if datatype.is_predefined or not fills_its_extent(datatype):
        return fills_its_extent(datatype)
    if datatype.combiner not in (
        MPI.COMBINER_DUP,
        MPI.COMBINER_CONTIGUOUS,
        MPI.COMBINER_RESIZED,
    ):
        return False
    parts = datatype.Get_contents()[-1]
    try:
        return all(map(is_one_block, parts))
    finally:
        free_types(part for part in parts if not part.is_predefined)


def free_types(types: Iterable[MPI.Datatype]) -> None:
    """Frees them while MPI is there."""
    if not MPI.Is_finalized():
        for datatype in types:
            datatype.Free()
