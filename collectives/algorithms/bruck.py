"""Bruck: ceil(log2 p) rounds for any number of ranks, by gathering at power-of-two distances.

Bruck, Ho, Kipnis, Upfal, Weathersby: "Efficient algorithms for all-to-all communications in
multiport message-passing systems", IEEE TPDS 1997.
"""

from collections.abc import Iterator

from collectives.schedule import Copy, Recv, Round, Send, recvbuf, sendbuf, workspace


def allgather(rank: int, size: int) -> Iterator[Round]:
    """workspace[j] holds block rank+j; each round appends the blocks of the rank at distance d.

    Cost: ceil(log2 p) rounds, p-1 blocks sent by each rank, p blocks of workspace, one rotation.
    """
    yield (Copy(workspace[0], sendbuf[0]),)
    held = 1
    while held < size:
        more = min(held, size - held)
        yield (
            Send((rank - held) % size, workspace[0:more]),
            Recv((rank + held) % size, workspace[held : held + more]),
        )
        held += more
    yield tuple(_rotated(size, rank))


def _rotated(size: int, rank: int) -> Iterator[Copy]:
    yield Copy(recvbuf[rank:size], workspace[0 : size - rank])
    if rank:
        yield Copy(recvbuf[0:rank], workspace[size - rank : size])


def alltoall(rank: int, size: int) -> Iterator[Round]:
    """workspace[j] is on its way to the rank j further; round k moves those with bit k in j.

    Cost: ceil(log2 p) rounds of p/2 blocks; 2p blocks of workspace; every block is packed and
    unpacked about log2 p / 2 times.  For small blocks on many ranks.
    """
    yield tuple(Copy(workspace[j], sendbuf[(rank + j) % size]) for j in range(size))
    for k in range((size - 1).bit_length()):
        distance = 1 << k
        moving = [j for j in range(size) if j & distance]
        packed = workspace[size : size + len(moving)]
        yield tuple(Copy(workspace[size + i], workspace[j]) for i, j in enumerate(moving))
        arrived = size + len(moving)
        yield (
            Send((rank + distance) % size, packed),
            Recv((rank - distance) % size, workspace[arrived : arrived + len(moving)]),
        )
        yield tuple(Copy(workspace[j], workspace[arrived + i]) for i, j in enumerate(moving))
    yield tuple(Copy(recvbuf[(rank - j) % size], workspace[j]) for j in range(size))


def alltoall_workspace(size: int) -> int:
    """p blocks under way, and for the largest round (bit 0) p/2 packed to go and p/2 arriving."""
    return size + 2 * (size // 2)
