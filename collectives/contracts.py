"""What each collective starts from and must end with: the statement that the verifier proves.

A *value* is a set of contributions to be reduced: ``sendbuf[chunk]`` of every rank in ``ranks``.
Rank ``r`` starts with ``Value({r}, i)`` in ``sendbuf[i]`` and with nothing else.

Buffers are made of *blocks* (the unit of the MPI call: one for an all-reduce, one a rank for an
all-gather) and each block is cut into ``n`` chunks, so chunk ``i`` is piece ``i mod n`` of block
``i // n``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from collectives.errors import InvalidBuffer, UnknownAlgorithm


class Value(NamedTuple):
    """The reduction of ``sendbuf[chunk]`` over the ranks ``range(*ranks)``."""

    ranks: range
    chunk: int


@dataclass(frozen=True)
class Contract:
    """One collective.

    Attributes:
        collective: its name in the registry and on the command line.
        send_blocks, recv_blocks: blocks of ``sendbuf`` and ``recvbuf`` as functions of the size.
        result: ``result(rank, size, n, i)`` is the value that ``recvbuf[i]`` must end with.
        in_place: ``in_place(rank, n)`` is the chunk of ``recvbuf`` at which ``sendbuf`` lies when
            the caller passes ``MPI.IN_PLACE``; ``None`` if there is no room for it there.
        traffic: ``traffic(size)`` times algbw is busbw (nccl-tests' convention).
        reduces: whether the collective takes an operation.
    """

    collective: str
    send_blocks: Callable[[int], int]
    recv_blocks: Callable[[int], int]
    result: Callable[[int, int, int, int], Value]
    in_place: Callable[[int, int], int] | None
    traffic: Callable[[int], float]
    reduces: bool = False


ALLREDUCE = Contract(
    collective="allreduce",
    send_blocks=lambda size: 1,
    recv_blocks=lambda size: 1,
    result=lambda rank, size, n, i: Value(range(size), i),
    in_place=lambda rank, n: 0,
    traffic=lambda size: 2 * (size - 1) / size,
    reduces=True,
)

REDUCE_SCATTER = Contract(
    collective="reduce_scatter",
    send_blocks=lambda size: size,
    recv_blocks=lambda size: 1,
    result=lambda rank, size, n, i: Value(range(size), rank * n + i),
    in_place=None,
    traffic=lambda size: (size - 1) / size,
    reduces=True,
)

ALLGATHER = Contract(
    collective="allgather",
    send_blocks=lambda size: 1,
    recv_blocks=lambda size: size,
    result=lambda rank, size, n, i: Value(range(i // n, i // n + 1), i % n),
    in_place=lambda rank, n: rank * n,
    traffic=lambda size: (size - 1) / size,
)

ALLTOALL = Contract(
    collective="alltoall",
    send_blocks=lambda size: size,
    recv_blocks=lambda size: size,
    result=lambda rank, size, n, i: Value(range(i // n, i // n + 1), rank * n + i % n),
    in_place=lambda rank, n: 0,
    traffic=lambda size: (size - 1) / size,
)

#: From rank 0; :func:`collectives.rooted.rooted` makes any rank the root.
BROADCAST = Contract(
    collective="broadcast",
    send_blocks=lambda size: 1,
    recv_blocks=lambda size: 1,
    result=lambda rank, size, n, i: Value(range(1), i),
    in_place=lambda rank, n: 0,
    traffic=lambda size: 1.0,
)

CONTRACTS = {c.collective: c for c in (ALLREDUCE, REDUCE_SCATTER, ALLGATHER, ALLTOALL, BROADCAST)}


def place(contract: Contract, rank: int, n: int) -> int:
    """Where ``sendbuf`` lies in place; raises :class:`InvalidBuffer` if it cannot."""
    if contract.in_place is None:
        raise InvalidBuffer(
            f"{contract.collective} in place has no room for the input; pass a send buffer"
        )
    return contract.in_place(rank, n)


def contract(collective: str) -> Contract:
    """The contract of ``collective``; raises :class:`UnknownAlgorithm` if there is none."""
    try:
        return CONTRACTS[collective]
    except KeyError:
        known = ", ".join(CONTRACTS)
        raise UnknownAlgorithm(f"no collective {collective!r}; there are {known}") from None
