"""Double binary tree: each half of the buffer has its own tree, and a leaf of one is interior in
the other, so that every rank sends and receives all the time.

Sanders, Speck, Traff: "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
Parallel Computing 2009.
"""

from collections.abc import Iterator
from typing import NamedTuple

from collectives.algorithms.tree import TreePlace, fall, rise
from collectives.schedule import Copy, Recv, Round, Send, recvbuf, sendbuf, workspace


class Node(NamedTuple):
    """A place in an in-order binary tree; ``height``: levels above the leaves."""

    height: int
    parent: int | None
    children: tuple[int, ...]


def node(place: int, size: int) -> Node:
    """The node at ``place`` of the tree over ``0 .. size-1``.

    A place's subtree spans less than its lowest set bit to each side.  Root 0 lies above all of
    them and has one child, the largest power of two below ``size``.
    """
    top = 1 << (size - 1).bit_length()
    if place == 0:
        return Node(top.bit_length() - 1, None, (top >> 1,) if size > 1 else ())
    span = place & -place
    upwards = (place ^ span) | (span << 1)
    parent = upwards if upwards < size else place ^ span
    left = place - span // 2
    reach = span // 2
    while place + reach >= size:  # the right subtree is cut off by the end of the ranks
        reach //= 2
    children = tuple(child for child in (left, place + reach) if child != place)
    return Node(span.bit_length() - 1, parent, children)


def trees(rank: int, size: int) -> list[TreePlace]:
    """A rank's places in both trees: in rank order, which carries chunk 0, and by
    :func:`second_rank`, which carries chunk 1."""
    second_place = size - 1 - rank if size % 2 == 0 else (rank - 1) % size
    both = []
    for place, rank_at in ((rank, lambda place, size: place), (second_place, second_rank)):
        height, parent, children = node(place, size)
        parent_rank = None if parent is None else rank_at(parent, size)
        parent_height = 0 if parent is None else node(parent, size).height
        child_ranks = tuple(rank_at(child, size) for child in children)
        both.append(TreePlace(height, parent_rank, parent_height, child_ranks))
    return both


def second_rank(place: int, size: int) -> int:
    """The rank at a place of the second tree: the mirror image (even p) or the shift (odd p)."""
    return size - 1 - place if size % 2 == 0 else (place + 1) % size


def allreduce(rank: int, size: int) -> Iterator[Round]:
    """Reduce up both trees at once, then broadcast down both.

    Cost: 2 ceil(log2 p) rounds, half of the buffer in each message; at most 2 times the buffer sent
    by a rank.
    """
    shares = [*enumerate(trees(rank, size))]
    yield from rise(shares, _height(size))
    yield from fall(shares, _height(size))


def reduce(rank: int, size: int) -> Iterator[Round]:
    """Reduce up both trees; the second root sends its half to rank 0.

    Cost: 1 + ceil(log2 p) rounds, half of the buffer in each message.
    """
    both, second = trees(rank, size), second_rank(0, size)
    total = workspace if rank else recvbuf
    yield from rise([*enumerate(both)], _height(size), total)
    if rank == second:
        yield (Send(0, total[1] if both[1].children else sendbuf[1]),)
    elif rank == 0:
        yield (Recv(second, recvbuf[1]),)


def broadcast(rank: int, size: int) -> Iterator[Round]:
    """Rank 0 sends the second half to the second root; both trees then broadcast.

    Cost: 1 + ceil(log2 p) rounds, half of the buffer in each message.
    """
    # Rank 0 has all already, and its memory may be read-only: nobody sends it anything.
    both = [
        tree._replace(
            parent=tree.parent if rank else None, children=tuple(c for c in tree.children if c)
        )
        for tree in trees(rank, size)
    ]
    second = second_rank(0, size)
    if rank == 0:
        yield (Copy(recvbuf[0:2], sendbuf[0:2]),)
        yield (Send(second, recvbuf[1]),)
    else:
        yield ()
        yield (Recv(0, recvbuf[1]),) if rank == second else ()
    yield from fall([*enumerate(both)], _height(size))


def _height(size: int) -> int:
    return (size - 1).bit_length()
