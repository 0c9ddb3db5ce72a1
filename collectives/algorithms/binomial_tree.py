"""Binomial tree: reduce to rank 0, then broadcast from it; latency-optimal for a single root.

The textbook's T_tree.  Thakur, Rabenseifner, Gropp, IJHPCA 2005.
"""

from collections.abc import Iterator

from collectives.schedule import Copy, Recv, RecvReduce, Round, Send, recvbuf, sendbuf


def allreduce(rank: int, size: int) -> Iterator[Round]:
    """Reduce up the tree, broadcast down it.

    Keeps rank order.  Cost: 2 ceil(log2 p) rounds, the whole buffer in each.
    """
    held = sendbuf[0]
    for distance in (1 << k for k in range((size - 1).bit_length())):
        if rank % (2 * distance) == distance:
            yield (Send(rank - distance, held),)
        elif rank % (2 * distance) == 0 and rank + distance < size:
            yield (RecvReduce(rank + distance, recvbuf[0], held),)
            held = recvbuf[0]
        else:
            yield ()
    yield from _down(rank, size)


def broadcast(rank: int, size: int) -> Iterator[Round]:
    """Cost: ceil(log2 p) rounds, the whole buffer in each."""
    yield (Copy(recvbuf[0], sendbuf[0]),) if rank == 0 else ()
    yield from _down(rank, size)


def _down(rank: int, size: int) -> Iterator[Round]:
    for distance in (1 << k for k in reversed(range((size - 1).bit_length()))):
        if rank % (2 * distance) == distance:
            yield (Recv(rank - distance, recvbuf[0]),)
        elif rank % (2 * distance) == 0 and rank + distance < size:
            yield (Send(rank + distance, recvbuf[0]),)
        else:
            yield ()
