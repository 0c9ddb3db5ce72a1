"""Calls on pieces of ordinary memory, one after the other, and on their places in slots.

A plan has one call for all pieces of a length: it finds its memory by the number of the piece.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from collectives.errors import MismatchError
from collectives.execution.memory import Combine, Items
from collectives.execution.transport import Request
from collectives.execution.transport.flags import RunCount
from collectives.execution.transport.slots import SlotPair

#: One part of a chunk's memory, by the number of the piece.
Views = list[Items]


@dataclass(slots=True, eq=False)
class Pieces:
    """Pieces of one length, that many items of each block from each of ``starts`` on; piece ``at``
    is the next one."""

    length: int
    starts: range
    at: int = 0

    def advance(self) -> None:
        self.at = (self.at + 1) % len(self.starts)


@dataclass(slots=True, eq=False)
class OnPiece:
    """A call on views of the next piece."""

    pieces: Pieces
    function: Callable[..., object]
    views: tuple[Views, ...]

    def __call__(self) -> None:
        at = self.pieces.at
        self.function(*[views[at] for views in self.views])


@dataclass(slots=True, eq=False)
class _InSlot:
    """A call on the next piece's own memory and its place in a slot."""

    pieces: Pieces
    pair: SlotPair
    slots: tuple[Items, Items]
    own: Views


@dataclass(slots=True, eq=False)
class PieceMessage:
    """The next piece's message to or from another node, in the shape of a request."""

    pieces: Pieces
    requests: list[Request]
    testall: Callable[[Sequence[Any]], bool]

    def Start(self) -> None:
        self.requests[self.pieces.at].Start()

    def Test(self) -> bool:
        return self.testall([self.requests[self.pieces.at]])

    def Wait(self) -> None:
        self.requests[self.pieces.at].Wait()

    def Free(self) -> None:
        """Pieces share their rounds, so it is called for each of them."""
        while self.requests:
            self.requests.pop().Free()


class StorePiece(_InSlot):
    """A copy into the slot whose turn it is."""

    def __call__(self) -> None:
        np.copyto(self.slots[self.pair.turn], self.own[self.pieces.at])


@dataclass(slots=True, eq=False)
class LoadPiece(_InSlot):
    """A copy of what the peer has stored, which is in the slot to which this rank stores next.

    NumPy's loop: on some processors ``memcpy`` takes four times as long, as its ``rep movsb`` is
    slow where another core has just written the lines.
    """

    def __post_init__(self) -> None:  # bytes, as the loop must not know the type
        one, other, *self.own = (items.view(np.uint8) for items in (*self.slots, *self.own))
        self.slots = one, other

    def __call__(self) -> None:
        np.positive(self.slots[1 - self.pair.turn], out=self.own[self.pieces.at])


@dataclass(slots=True, eq=False)
class ReducePiece(_InSlot):
    """A reduction of what the peer has stored."""

    operand: Views
    combine: Combine
    is_left: bool

    def __call__(self) -> None:
        at, slot = self.pieces.at, self.slots[1 - self.pair.turn]
        given = (slot, self.operand[at]) if self.is_left else (self.operand[at], slot)
        self.combine(*given, out=self.own[at])


@dataclass(slots=True, eq=False)
class Label:
    """Says to which call the message belongs that this rank stores."""

    pair: SlotPair
    label: int

    def __call__(self) -> None:
        self.pair.labels[self.pair.turn][0] = self.label


@dataclass(slots=True, eq=False)
class ExpectLabel:
    """Raises :class:`MismatchError` if the peer's message belongs to another call."""

    pair: SlotPair
    label: int
    peer: int
    call: str

    def __call__(self) -> None:
        if self.pair.labels[1 - self.pair.turn][0] != self.label:
            raise MismatchError(
                f"rank {self.peer} makes another call than this rank's {self.call}: counts, types "
                "and operations must be the same on all ranks; COLLECTIVES_CHECK=1 names both lines"
            )


@dataclass(slots=True, eq=False)
class SwapSlots:
    """The end of an exchange, which the peer ends at the count ``until`` of this piece."""

    pair: SlotPair
    runs: RunCount
    until: int
    stores: bool
    reads: bool

    def __call__(self) -> None:
        self.pair.swap(self.runs.base + self.until if self.stores else 0, self.reads)
