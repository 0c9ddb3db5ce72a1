"""Scans: rank r ends with the reduction over the ranks up to itself (scan) or before it (exscan).

Hillis, Steele: "Data parallel algorithms", CACM 1986, and the chain of
A. Rodriguez: "Deep Learning Systems", 2020.
"""

from collections.abc import Iterator

from collectives.schedule import Chunk, Copy, Recv, RecvReduce, Round, Send, Step, recvbuf, sendbuf


def chain(rank: int, size: int) -> Iterator[Round]:
    """From each rank to the next.

    Cost: p-1 messages of the whole buffer in a row; with k segments, p-2+k of a k-th of it.
    """
    yield from _chain(rank, size, sendbuf[0])


def recursive_doubling(rank: int, size: int) -> Iterator[Round]:
    """In round k, rank r reduces the partial result of the rank 2^k before it.

    Cost: ceil(log2 p) rounds, the whole buffer sent and reduced in each.
    """
    yield from _doubling(rank, size, sendbuf[0])


def exclusive_chain(rank: int, size: int) -> Iterator[Round]:
    """Every contribution moves on by one rank, then :func:`chain`.  Cost: one round more."""
    yield _shift(rank, size)
    if rank > 0:
        yield from _chain(rank - 1, size - 1, recvbuf[0], first=1)


def exclusive_doubling(rank: int, size: int) -> Iterator[Round]:
    """Every contribution moves on by one rank, then :func:`recursive_doubling`.

    Cost: one round more.
    """
    yield _shift(rank, size)
    if rank > 0:
        yield from _doubling(rank - 1, size - 1, recvbuf[0], first=1)


def _shift(rank: int, size: int) -> Round:
    steps: list[Step] = []
    if rank + 1 < size:
        steps.append(Send(rank + 1, sendbuf[0]))
    if rank > 0:
        steps.append(Recv(rank - 1, recvbuf[0]))
    return tuple(steps)


def _chain(place: int, size: int, mine: Chunk, first: int = 0) -> Iterator[Round]:
    """The scan over the ranks from ``first`` on; ``place`` counts from there."""
    rank = place + first
    kept = list(_kept(mine))
    if place == 0:
        yield from kept
    else:
        yield from [()] * (len(kept) + place - 1)
        yield (RecvReduce(rank - 1, recvbuf[0], mine),)
    if place + 1 < size:
        yield (Send(rank + 1, recvbuf[0]),)


def _doubling(place: int, size: int, mine: Chunk, first: int = 0) -> Iterator[Round]:
    rank, held = place + first, mine
    for distance in (1 << k for k in range((size - 1).bit_length())):
        steps: list[Step] = []
        if place + distance < size:
            steps.append(Send(rank + distance, held))
        if place >= distance:
            steps.append(RecvReduce(rank - distance, recvbuf[0], held))
            held = recvbuf[0]
        yield tuple(steps)
    if place == 0:
        yield from _kept(mine)


def _kept(mine: Chunk) -> Iterator[Round]:
    """The first rank's result is its own contribution."""
    if mine != recvbuf[0]:
        yield (Copy(recvbuf[0], mine),)
