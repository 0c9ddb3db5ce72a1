"""A rank's place in a tree, and its steps when the tree reduces upwards or broadcasts downwards.

A message between a parent of height h and its children moves in round h-1 upwards and in the h-th
round from the end downwards, which makes both ends agree on the round.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from collectives.schedule import (
    Buffer,
    Chunk,
    Recv,
    RecvReduce,
    Round,
    Send,
    Step,
    recvbuf,
    sendbuf,
)


class TreePlace(NamedTuple):
    """Position of a rank in a tree; ``height`` counts from the leaves."""

    height: int
    parent: int | None
    parent_height: int
    children: tuple[int, ...]


#: The chunks that each of several trees carries, and a rank's place in it.
Shares = Sequence[tuple[int | slice, TreePlace]]


def rise(shares: Shares, height: int, totals: Buffer = recvbuf) -> Iterator[Round]:
    """The rounds of a reduction up trees of this height."""
    for h in range(1, height + 1):
        yield tuple(step for i, place in shares for step in _up(place, h, sendbuf[i], totals[i]))


def fall(shares: Shares, height: int) -> Iterator[Round]:
    """The rounds of a broadcast down trees of this height."""
    for h in reversed(range(1, height + 1)):
        yield tuple(step for i, place in shares for step in _down(place, h, recvbuf[i]))


def _up(place: TreePlace, h: int, mine: Chunk, total: Chunk) -> Iterator[Step]:
    """Steps between parents of height ``h`` and their children in a reduction of ``mine``."""
    if place.parent is not None and place.parent_height == h:
        yield Send(place.parent, total if place.children else mine)
    if place.height == h:
        for done, child in enumerate(place.children):
            yield RecvReduce(child, total, total if done else mine)


def _down(place: TreePlace, h: int, total: Chunk) -> Iterator[Step]:
    """Steps between parents of height ``h`` and their children in a broadcast of ``total``."""
    if place.parent is not None and place.parent_height == h:
        yield Recv(place.parent, total)
    if place.height == h:
        for child in place.children:
            yield Send(child, total)
