"""Ring: every rank talks to its two neighbours only and moves the least data possible.

Patarasuk, Yuan: "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009.
"""

from collections.abc import Iterator

from collectives.schedule import Copy, Recv, RecvReduce, Round, Send, recvbuf, sendbuf, workspace


def allreduce(rank: int, size: int) -> Iterator[Round]:
    """Reduce-scatter, then all-gather, around the ring.

    Cost: 2(p-1) rounds, 2(p-1)/p of the buffer sent by each rank, (p-1)/p of it reduced.
    """
    yield from _reduce_scatter(rank, size)
    yield from _circulate(rank, size)


def reduce_scatter(rank: int, size: int) -> Iterator[Round]:
    """Partial sums travel once round the ring, each through its own block of workspace.

    Cost: p-1 rounds, p-1 blocks sent and reduced by each rank.
    """
    right, left = (rank + 1) % size, (rank - 1) % size
    partial = sendbuf[left]
    for step in range(size - 1):
        arriving = (rank - 2 - step) % size
        last = step == size - 2
        reduced = recvbuf[0] if last else workspace[arriving]
        yield Send(right, partial), RecvReduce(left, reduced, sendbuf[arriving])
        partial = reduced


def allgather(rank: int, size: int) -> Iterator[Round]:
    """Every block travels once round the ring.  Cost: p-1 rounds, p-1 blocks sent by each rank."""
    yield (Copy(recvbuf[rank], sendbuf[0]),)
    yield from _circulate(rank, size)


def _reduce_scatter(rank: int, size: int) -> Iterator[Round]:
    """Chunk c starts at rank c+1 and is complete when it arrives at rank c."""
    right, left = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):
        leaving, arriving = (rank - 1 - step) % size, (rank - 2 - step) % size
        partial = sendbuf[leaving] if step == 0 else recvbuf[leaving]
        yield Send(right, partial), RecvReduce(left, recvbuf[arriving], sendbuf[arriving])


def _circulate(rank: int, size: int) -> Iterator[Round]:
    """Rank r starts with recvbuf[r] and passes on the chunk that it received last."""
    right, left = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):
        leaving, arriving = (rank - step) % size, (rank - 1 - step) % size
        yield Send(right, recvbuf[leaving]), Recv(left, recvbuf[arriving])
