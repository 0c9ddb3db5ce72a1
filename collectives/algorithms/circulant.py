"""Circulant: the ring's volume in a logarithmic number of rounds, for any number of ranks.

Traff: "Optimal, non-pipelined reduce-scatter and allreduce algorithms", 2024.  Rank r talks to the
ranks at distances s_0 = 1 < s_1 < ... < s_q = p, each half of the next, rounded up.
"""

from collections.abc import Iterator
from functools import cache
from itertools import pairwise

from collectives.schedule import (
    Buffer,
    Chunk,
    Copy,
    Recv,
    RecvReduce,
    Round,
    Send,
    Step,
    recvbuf,
    sendbuf,
    workspace,
)


@cache
def skips(size: int) -> tuple[int, ...]:
    """The distances s_0 .. s_q.

    >>> skips(7)
    (1, 2, 4, 7)
    """
    distances = [size]
    while distances[0] > 1:
        distances.insert(0, (distances[0] + 1) // 2)
    return tuple(distances)


def allreduce(rank: int, size: int) -> Iterator[Round]:
    """Reduce-scatter with falling distances, then all-gather with rising ones.

    Cost: 2 ceil(log2 p) rounds, 2(p-1)/p of the buffer sent by each rank, (p-1)/p of it reduced.
    """
    yield from _reduce_scatter(rank, size, recvbuf)
    yield from _gather(rank, size)


def reduce_scatter(rank: int, size: int) -> Iterator[Round]:
    """The first half, in a workspace of p blocks.

    Cost: ceil(log2 p) rounds, p-1 blocks sent and reduced by each rank, one block copied.
    """
    yield from _reduce_scatter(rank, size, workspace)
    yield (Copy(recvbuf[0], workspace[rank]),)


def allgather(rank: int, size: int) -> Iterator[Round]:
    """The blocks held nearly double in every round.

    Cost: ceil(log2 p) rounds, p-1 blocks sent by each rank, no rotation.
    """
    yield (Copy(recvbuf[rank], sendbuf[0]),)
    yield from _gather(rank, size)


def _reduce_scatter(rank: int, size: int, sums: Buffer) -> Iterator[Round]:
    """Rank r adds up chunk r, and until they are sent those of the ranks behind it."""
    distances = skips(size)
    held = sendbuf
    for near, far in reversed(list(pairwise(distances))):
        to, source = (rank + near) % size, (rank - near) % size
        steps: list[Step] = [Send(to, chunk) for chunk in _behind(held, rank, near, far, size)]
        mine = _behind(sums, rank, 0, far - near, size)
        operands = _behind(held, rank, 0, far - near, size)
        steps += [RecvReduce(source, c, operand) for c, operand in zip(mine, operands)]
        if held is sendbuf:  # the middle chunk of an odd number is not reduced yet
            middle = _behind(sums, rank, far - near, near, size)
            steps += [Copy(c, sendbuf[c.start : c.stop]) for c in middle]
        yield tuple(steps)
        held = sums


def _gather(rank: int, size: int) -> Iterator[Round]:
    """Rank r starts with recvbuf[r] and collects the blocks behind it."""
    distances = skips(size)
    for near, far in pairwise(distances):
        to, source = (rank - near) % size, (rank + near) % size
        yield (
            *(Send(to, chunk) for chunk in _behind(recvbuf, rank, 0, far - near, size)),
            *(Recv(source, chunk) for chunk in _behind(recvbuf, rank, near, far, size)),
        )


def _behind(buffer: Buffer, rank: int, start: int, stop: int, size: int) -> list[Chunk]:
    """Blocks rank+start .. rank+stop-1, modulo the size: one range, or two round the end."""
    if start == stop:
        return []
    first = (rank + start) % size
    last = first + stop - start
    return [buffer[first:last]] if last <= size else [buffer[first:size], buffer[0 : last - size]]
