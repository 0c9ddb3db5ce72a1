"""Pairwise exchange: p-1 rounds, each rank with one partner to send to and one to receive from."""

from collections.abc import Iterator

from collectives.schedule import Copy, Recv, Round, Send, recvbuf, sendbuf


def alltoall(rank: int, size: int) -> Iterator[Round]:
    """In round d, send to rank+d and receive from rank-d; never more than one message a port.

    Cost: p-1 rounds of one block.
    """
    yield (Copy(recvbuf[rank], sendbuf[rank]),)
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        yield Send(to, sendbuf[to]), Recv(source, recvbuf[source])
