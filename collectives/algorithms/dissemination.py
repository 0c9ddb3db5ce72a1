"""Dissemination: the ranks that a rank has heard from double in every round, for any size.

Hensgen, Finkel, Manber: "Two algorithms for barrier synchronization", IJPP 1988.
"""

from collections.abc import Iterator

from collectives.schedule import RecvReduce, Round, Send, recvbuf, sendbuf


def barrier(rank: int, size: int) -> Iterator[Round]:
    """In round k, tell the rank at distance 2^k, and hear from the one as far on the other side.

    A contribution may come in twice, which a barrier does not mind.  Cost: ceil(log2 p) rounds.
    """
    held = sendbuf[0]
    for distance in (1 << k for k in range((size - 1).bit_length())):
        to, source = (rank + distance) % size, (rank - distance) % size
        yield Send(to, held), RecvReduce(source, recvbuf[0], held)
        held = recvbuf[0]
