"""Direct: one hop between every pair of ranks, all in flight together; for fully connected ranks.

Rodriguez ("Deep Learning Systems", 2020) prints the cost of this algorithm on p-1 ports,
2(L + T'/P), as "AllReduce-Ring"; the ring proper has 2(p-1) rounds
(:mod:`collectives.algorithms.ring`).
"""

from collections.abc import Iterator

from collectives.schedule import Chunk, Copy, Recv, RecvReduce, Round, Send, recvbuf, sendbuf


def allreduce(rank: int, size: int) -> Iterator[Round]:
    """Rank r reduces chunk r of everybody, then sends it to everybody.

    Keeps rank order.  Cost: 2 rounds, 2(p-1) messages of 1/p of the buffer by each rank.
    """
    others = _others(rank, size)
    yield _reduced(rank, size, recvbuf[rank])
    yield (
        *(Send(peer, recvbuf[rank]) for peer in others),
        *(Recv(peer, recvbuf[peer]) for peer in others),
    )


def reduce_scatter(rank: int, size: int) -> Iterator[Round]:
    """Rank r reduces block r of everybody.  Keeps rank order.

    Cost: 1 round, p-1 messages of one block by each rank.
    """
    yield _reduced(rank, size, recvbuf[0])


def reduce(rank: int, size: int, root: int) -> Iterator[Round]:
    """The root reduces everybody's buffer.  Keeps rank order.

    Cost: 1 round, p-1 messages of the whole buffer at the root.
    """
    if rank == root:
        yield tuple(_summed(rank, size, sendbuf[0], recvbuf[0]))
    else:
        yield (Send(root, sendbuf[0]),)


def _reduced(rank: int, size: int, total: Chunk) -> Round:
    return (
        *(Send(peer, sendbuf[peer]) for peer in _others(rank, size)),
        *_summed(rank, size, sendbuf[rank], total),
    )


def _summed(rank: int, size: int, mine: Chunk, total: Chunk) -> Iterator[RecvReduce]:
    # Downwards from the own rank, then upwards: each operand extends the interval that is reduced.
    for done, peer in enumerate([*range(rank - 1, -1, -1), *range(rank + 1, size)]):
        yield RecvReduce(peer, total, total if done else mine)


def allgather(rank: int, size: int) -> Iterator[Round]:
    """Send the own block to everybody.  Cost: 1 round, p-1 messages of one block by each rank."""
    others = _others(rank, size)
    yield (
        Copy(recvbuf[rank], sendbuf[0]),
        *(Send(peer, sendbuf[0]) for peer in others),
        *(Recv(peer, recvbuf[peer]) for peer in others),
    )


def alltoall(rank: int, size: int) -> Iterator[Round]:
    """Post everything at once ("linear").  Cost: 1 round, p-1 messages of a block by each rank."""
    others = _others(rank, size)
    yield (
        Copy(recvbuf[rank], sendbuf[rank]),
        *(Send(peer, sendbuf[peer]) for peer in others),
        *(Recv(peer, recvbuf[peer]) for peer in others),
    )


def gather(rank: int, size: int, root: int) -> Iterator[Round]:
    """Everybody sends to the root.  Cost: 1 round, p-1 messages of one block at the root."""
    if rank != root:
        yield (Send(root, sendbuf[0]),)
        return
    yield (
        Copy(recvbuf[rank], sendbuf[0]),
        *(Recv(peer, recvbuf[peer]) for peer in _others(rank, size)),
    )


def scatter(rank: int, size: int, root: int) -> Iterator[Round]:
    """The root sends to everybody.  Cost: 1 round, p-1 messages of one block at the root."""
    if rank != root:
        yield (Recv(root, recvbuf[0]),)
        return
    yield (
        Copy(recvbuf[0], sendbuf[rank]),
        *(Send(peer, sendbuf[peer]) for peer in _others(rank, size)),
    )


def _others(rank: int, size: int) -> list[int]:
    """Starting behind the own rank, so that not everybody sends to rank 0 first."""
    return [(rank + distance) % size for distance in range(1, size)]
