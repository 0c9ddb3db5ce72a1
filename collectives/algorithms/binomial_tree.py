"""Binomial tree: a rank's subtree is the ranks behind it, half of them for every bit set.

Latency-optimal for a single root; Rodriguez's T_tree.  Thakur, Rabenseifner, Gropp, IJHPCA 2005.
"""

from collections.abc import Callable, Iterator

from collectives.schedule import (
    Chunk,
    Copy,
    Recv,
    RecvReduce,
    Round,
    Send,
    recvbuf,
    sendbuf,
    workspace,
)


def allreduce(rank: int, size: int) -> Iterator[Round]:
    """Reduce up the tree, broadcast down it.

    Keeps rank order.  Cost: 2 ceil(log2 p) rounds, the whole buffer in each.
    """
    yield from _up(rank, size, recvbuf[0])
    yield from _down(rank, size, lambda first, many: recvbuf[0])


def reduce(rank: int, size: int) -> Iterator[Round]:
    """Cost: ceil(log2 p) rounds, the whole buffer in each."""
    yield from _up(rank, size, workspace[0] if rank else recvbuf[0])


def broadcast(rank: int, size: int) -> Iterator[Round]:
    """Cost: ceil(log2 p) rounds, the whole buffer in each."""
    yield (Copy(recvbuf[0], sendbuf[0]),) if rank == 0 else ()
    yield from _down(rank, size, lambda first, many: recvbuf[0])


def gather(rank: int, size: int) -> Iterator[Round]:
    """Subtrees move up whole.  Cost: ceil(log2 p) rounds, p-1 blocks received by the root."""
    blocks = workspace if rank else recvbuf
    yield (Copy(blocks[rank], sendbuf[0]),)
    for distance in _distances(size):
        if rank % (2 * distance) == distance:
            yield (Send(rank - distance, blocks[rank : min(rank + distance, size)]),)
        elif _has_child(rank, distance, size):
            child = rank + distance
            yield (Recv(child, blocks[child : min(child + distance, size)]),)
        else:
            yield ()


def scatter(rank: int, size: int) -> Iterator[Round]:
    """Subtrees move down whole.  Cost: ceil(log2 p) rounds, p-1 blocks sent by the root."""
    blocks = workspace if rank else sendbuf
    yield from _down(rank, size, lambda first, many: blocks[first : min(first + many, size)])
    yield (Copy(recvbuf[0], blocks[rank]),)


def _distances(size: int) -> list[int]:
    return [1 << k for k in range((size - 1).bit_length())]


def _has_child(rank: int, distance: int, size: int) -> bool:
    return rank % (2 * distance) == 0 and rank + distance < size


def _up(rank: int, size: int, total: Chunk) -> Iterator[Round]:
    held = sendbuf[0]
    for distance in _distances(size):
        if rank % (2 * distance) == distance:
            yield (Send(rank - distance, held),)
        elif _has_child(rank, distance, size):
            yield (RecvReduce(rank + distance, total, held),)
            held = total
        else:
            yield ()


def _down(rank: int, size: int, part: Callable[[int, int], Chunk]) -> Iterator[Round]:
    """``part``: what goes to the first of so many ranks, a subtree."""
    for distance in reversed(_distances(size)):
        if rank % (2 * distance) == distance:
            yield (Recv(rank - distance, part(rank, distance)),)
        elif _has_child(rank, distance, size):
            yield (Send(rank + distance, part(rank + distance, distance)),)
        else:
            yield ()
