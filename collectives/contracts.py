"""The contract of each collective: its inputs and its required results, which the verifier proves.

A *value* is a set of contributions to be reduced: ``sendbuf[chunk]`` of every rank in ``ranks``.
Rank ``r`` starts with ``Value(range(r, r + 1), i)`` in ``sendbuf[i]`` and with nothing else.

Buffers are made of *blocks* (the unit of the MPI call: one for an all-reduce, one a rank for an
all-gather) and each block is cut into ``n`` chunks, so chunk ``i`` is piece ``i mod n`` of block
``i // n``.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

from collectives.errors import InvalidBuffer, UnknownAlgorithm

#: Most ranks of a job.
MOST_RANKS = 1 << 20


class Value(NamedTuple):
    """The reduction of ``sendbuf[chunk]`` over ``ranks``."""

    ranks: range
    chunk: int


class Member(NamedTuple):
    """One rank of a collective: what its buffers are like depends on no more than this."""

    rank: int
    size: int
    root: int = 0
    chunks: int = 1

    @property
    def is_root(self) -> bool:
        return self.rank == self.root


def _one(_: Member) -> int:
    return 1


def _each(m: Member) -> int:
    """A block for every rank."""
    return m.size


def _of_root(blocks: Callable[[Member], int]) -> Callable[[Member], int]:
    """``blocks`` at the root; the others have no such buffer."""
    return lambda m: blocks(m) if m.is_root else 0


def _everybody(m: Member, i: int) -> Value:
    """The reduction over all ranks."""
    return Value(range(m.size), i)


def _in_rank_order(m: Member, i: int) -> Value:
    """Block j comes from rank j."""
    return Value(range(i // m.chunks, i // m.chunks + 1), i % m.chunks)


def _first(_: Member) -> int:
    return 0


def _own_block(m: Member) -> int:
    return m.rank * m.chunks


@dataclass(frozen=True)
class Contract:
    """One collective.

    Attributes:
        collective: its name in the registry and on the command line.
        result: ``result(member, i)`` is the value that ``recvbuf[i]`` must end with, ``None`` if
            it is undefined.
        send_blocks, recv_blocks: blocks of a member's ``sendbuf`` and ``recvbuf``.
        in_place: the chunk of ``recvbuf`` at which ``sendbuf`` lies when the caller passes
            ``MPI.IN_PLACE``; ``None`` for a collective, or a member of it, that has no room there.
        traffic: ``traffic(size)`` times algbw is busbw (nccl-tests' convention).
        reduces: whether the collective takes an operation.
        rooted: whether it takes a root.
        idempotent: its operation is one of ``x op x = x``, so contributions may come in twice.
        block: names the block of which ``block(member, buffer, j)`` is an instance, for a
            collective with a v-variant: blocks of the same name have the same length.  ``None``
            for one whose length the member does not know.
    """

    collective: str
    result: Callable[[Member, int], Value | None]
    send_blocks: Callable[[Member], int] = _one
    recv_blocks: Callable[[Member], int] = _one
    in_place: Callable[[Member], int | None] | None = None
    traffic: Callable[[int], float] = lambda size: 1.0
    reduces: bool = False
    rooted: bool = False
    idempotent: bool = False
    block: Callable[[Member, str, int], Hashable] | None = None

    def place(self, member: Member) -> int | None:
        """The chunk of ``recvbuf`` at which ``sendbuf`` lies in place, if this member's does.

        Raises:
            InvalidBuffer: if nobody's can.
        """
        if self.in_place is None:
            raise InvalidBuffer(
                f"{self.collective} in place has no room for the input; pass a send buffer"
            )
        return self.in_place(member)

    def blocks(self, size: int) -> int:
        """Blocks of the largest buffer, the root's if there is one."""
        root = Member(0, size)
        return max(self.send_blocks(root), self.recv_blocks(root))

    def least_bytes(self, size: int, nbytes: int) -> int:
        """Bytes that each of ``size`` ranks sends at least, if the largest buffer has ``nbytes``;
        where there is a root, a rank may send none."""
        return 0 if self.rooted or size == 1 else round(self.traffic(size) * nbytes)


def _nearly_all(size: int) -> float:
    return (size - 1) / size


_CONTRACTS = (
    Contract(
        collective="allreduce",
        result=_everybody,
        in_place=_first,
        traffic=lambda size: 2 * (size - 1) / size,
        reduces=True,
    ),
    Contract(
        collective="reduce_scatter",
        send_blocks=_each,
        result=lambda m, i: Value(range(m.size), m.rank * m.chunks + i),
        traffic=_nearly_all,
        reduces=True,
        block=lambda m, buffer, j: m.rank if buffer == "recvbuf" else j,
    ),
    Contract(
        collective="allgather",
        recv_blocks=_each,
        result=_in_rank_order,
        in_place=_own_block,
        traffic=_nearly_all,
        block=lambda m, buffer, j: m.rank if buffer == "sendbuf" else j,
    ),
    Contract(
        collective="alltoall",
        send_blocks=_each,
        recv_blocks=_each,
        result=lambda m, i: Value(
            range(i // m.chunks, i // m.chunks + 1), m.rank * m.chunks + i % m.chunks
        ),
        in_place=_first,
        traffic=_nearly_all,
        block=lambda m, buffer, j: {"sendbuf": (m.rank, j), "recvbuf": (j, m.rank)}.get(buffer),
    ),
    Contract(
        collective="broadcast",
        send_blocks=_of_root(_one),
        result=lambda m, i: Value(range(m.root, m.root + 1), i),
        in_place=lambda m: 0 if m.is_root else None,
        rooted=True,
    ),
    Contract(
        collective="reduce",
        recv_blocks=_of_root(_one),
        result=_everybody,
        in_place=lambda m: 0 if m.is_root else None,
        reduces=True,
        rooted=True,
    ),
    Contract(
        collective="gather",
        recv_blocks=_of_root(_each),
        result=_in_rank_order,
        in_place=lambda m: _own_block(m) if m.is_root else None,
        traffic=_nearly_all,
        rooted=True,
        block=lambda m, buffer, j: {"sendbuf": m.rank, "recvbuf": j}.get(buffer),
    ),
    # In place, the root's block stays where it is, in ``sendbuf``.
    Contract(
        collective="scatter",
        send_blocks=_of_root(_each),
        result=lambda m, i: Value(range(m.root, m.root + 1), m.rank * m.chunks + i),
        traffic=_nearly_all,
        rooted=True,
        block=lambda m, buffer, j: {"sendbuf": j, "recvbuf": m.rank}.get(buffer),
    ),
    Contract(
        collective="scan",
        result=lambda m, i: Value(range(m.rank + 1), i),
        in_place=_first,
        reduces=True,
    ),
    # Rank 0 receives nothing.
    Contract(
        collective="exscan",
        result=lambda m, i: Value(range(m.rank), i) if m.rank else None,
        in_place=_first,
        reduces=True,
    ),
    # Everybody has heard of everybody.
    Contract(
        collective="barrier",
        result=_everybody,
        in_place=_first,
        traffic=lambda size: 0.0,
        reduces=True,
        idempotent=True,
    ),
)
CONTRACTS = {each.collective: each for each in _CONTRACTS}


def contract(collective: str) -> Contract:
    """The contract of ``collective``; raises :class:`UnknownAlgorithm` if there is none."""
    try:
        return CONTRACTS[collective]
    except KeyError:
        known = ", ".join(CONTRACTS)
        raise UnknownAlgorithm(f"no collective {collective!r}; there are {known}") from None
