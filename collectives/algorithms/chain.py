"""Chain: rank r passes on to rank r+1; with segments, the pipeline that fills every link.

Worringen: "Pipelining and overlapping for MPI collective operations", LCN 2003.
"""

from collections.abc import Iterator

from collectives.schedule import Copy, Recv, RecvReduce, Round, Send, recvbuf, sendbuf, workspace


def broadcast(rank: int, size: int) -> Iterator[Round]:
    """Cost: p-1 messages of the whole buffer in a row; with k segments, p-2+k of a k-th of it."""
    if rank == 0:
        yield (Copy(recvbuf[0], sendbuf[0]),)
    else:
        yield from [()] * rank
        yield (Recv(rank - 1, recvbuf[0]),)
    if rank < size - 1:
        yield (Send(rank + 1, recvbuf[0]),)


def reduce(rank: int, size: int) -> Iterator[Round]:
    """The way back, from rank p-1 to rank 0.  Cost: as :func:`broadcast`."""
    total = workspace[0] if rank else recvbuf[0]
    if rank == size - 1:
        yield (Send(rank - 1, sendbuf[0]),)
        return
    yield from [()] * (size - 2 - rank)
    yield (RecvReduce(rank + 1, total, sendbuf[0]),)
    if rank:
        yield (Send(rank - 1, total),)
