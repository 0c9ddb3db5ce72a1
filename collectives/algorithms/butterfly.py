"""Butterfly: in round k, each rank exchanges with the rank whose number differs in bit k.

Where the number of ranks is no power of two, the first ``2 * extra`` ranks are folded in pairs: the
odd one hands its data to the even one, sits out, and is given the result.

Rabenseifner, Traff: "More efficient reduction algorithms for non-power-of-two number of processors
in message-passing parallel systems", EuroPVM/MPI 2004; Thakur, Rabenseifner, Gropp: "Optimization
of collective communication operations in MPICH", IJHPCA 2005.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from collectives.schedule import Chunk, Copy, Recv, RecvReduce, Round, Send, recvbuf, sendbuf


@dataclass(frozen=True)
class Fold:
    """``size`` ranks folded onto ``2 ** dimensions`` vertices of a hypercube, in rank order."""

    size: int

    @cached_property
    def dimensions(self) -> int:
        return self.size.bit_length() - 1

    @cached_property
    def extra(self) -> int:
        return self.size - (1 << self.dimensions)

    def sits_out(self, rank: int) -> bool:
        return rank < 2 * self.extra and rank % 2 == 1

    def is_doubled(self, rank: int) -> bool:
        return rank < 2 * self.extra and rank % 2 == 0

    def vertex(self, rank: int) -> int:
        return rank // 2 if rank < 2 * self.extra else rank - self.extra

    def rank(self, vertex: int) -> int:
        return 2 * vertex if vertex < self.extra else vertex + self.extra


def chunks(size: int) -> int:
    """Chunks of the recursive halving: one for each vertex of the hypercube."""
    return 1 << Fold(size).dimensions


def recursive_doubling(rank: int, size: int) -> Iterator[Round]:
    """All-reduce: exchange and reduce the whole buffer in every round.

    Keeps rank order.  Cost: log2 p rounds with the whole buffer sent and reduced in each; for p no
    power of two, one round before (reduce) and one after (receive the result).
    """
    fold = Fold(size)
    everything = recvbuf[0]
    held = sendbuf[0]
    if fold.sits_out(rank):
        yield (Send(rank - 1, held),)
        yield from [()] * fold.dimensions
        yield (Recv(rank - 1, everything),)
        return
    if fold.extra:
        yield (RecvReduce(rank + 1, everything, held),) if fold.is_doubled(rank) else ()
        held = everything if fold.is_doubled(rank) else held
    for k in range(fold.dimensions):
        peer = fold.rank(fold.vertex(rank) ^ (1 << k))
        yield Send(peer, held), RecvReduce(peer, everything, held)
        held = everything
    if fold.extra:
        yield (Send(rank + 1, everything),) if fold.is_doubled(rank) else ()


def halving_doubling(rank: int, size: int) -> Iterator[Round]:
    """All-reduce: recursive halving reduce-scatter, then recursive doubling all-gather.

    The nearest ranks exchange the largest messages, and rank order is kept.  Cost: 2 log2 p rounds,
    2(p-1)/p of the buffer sent by each rank; the fold adds two rounds of the whole buffer.
    """
    yield from there_and_back(rank, size, _halves)


#: An exchange of a vertex: the peer, the chunks that it goes on with, and those of this rank.
Exchange = tuple[int, slice, slice]


def there_and_back(
    rank: int, size: int, exchanges: Callable[[Fold, int], Iterator[Exchange]]
) -> Iterator[Round]:
    """A reduce-scatter by the ``exchanges`` of the rank's vertex, and an all-gather by the same
    ones backwards."""
    fold, everything, held = Fold(size), slice(0, chunks(size)), sendbuf
    if fold.sits_out(rank):
        yield (Send(rank - 1, sendbuf[everything]),)
        yield from [()] * (2 * fold.dimensions)
        yield (Recv(rank - 1, recvbuf[everything]),)
        return
    if fold.extra:
        whole = RecvReduce(rank + 1, recvbuf[everything], sendbuf[everything])
        yield (whole,) if fold.is_doubled(rank) else ()
        held = recvbuf if fold.is_doubled(rank) else held
    done = list(exchanges(fold, fold.vertex(rank)))
    for peer, given, kept in done:
        yield Send(peer, held[given]), RecvReduce(peer, recvbuf[kept], held[kept])
        held = recvbuf
    for peer, given, kept in reversed(done):
        yield Send(peer, recvbuf[kept]), Recv(peer, recvbuf[given])
    if fold.extra:
        yield (Send(rank + 1, recvbuf[everything]),) if fold.is_doubled(rank) else ()


def _halves(fold: Fold, vertex: int) -> Iterator[Exchange]:
    low, high = 0, 1 << fold.dimensions
    for k in range(fold.dimensions):
        middle = (low + high) // 2
        lower, upper = slice(low, middle), slice(middle, high)
        given, kept = (lower, upper) if vertex >> k & 1 else (upper, lower)
        yield fold.rank(vertex ^ (1 << k)), given, kept
        low, high = kept.start, kept.stop


def allgather(rank: int, size: int) -> Iterator[Round]:
    """Recursive doubling: the blocks held double in every round.

    Cost: log2 p rounds, p-1 blocks sent by each rank; for p no power of two, one round before (one
    block) and one after (all blocks).
    """
    fold = Fold(size)
    yield (Copy(recvbuf[rank], sendbuf[0]),)
    if fold.sits_out(rank):
        yield (Send(rank - 1, sendbuf[0]),)
        yield from [()] * fold.dimensions
        yield (Recv(rank - 1, recvbuf[0:size]),)
        return
    if fold.extra:
        yield (Recv(rank + 1, recvbuf[rank + 1]),) if fold.is_doubled(rank) else ()
    for k in range(fold.dimensions):
        vertex = fold.vertex(rank) >> k
        peer = fold.rank(fold.vertex(rank) ^ (1 << k))
        yield Send(peer, _gathered(fold, vertex, k)), Recv(peer, _gathered(fold, vertex ^ 1, k))
    if fold.extra:
        # The pair's own two blocks are in place on the other side already, but one message of
        # everything is cheaper than three.
        yield (Send(rank + 1, recvbuf[0:size]),) if fold.is_doubled(rank) else ()


def _gathered(fold: Fold, vertex: int, k: int) -> Chunk:
    """Blocks of the subcube of dimension k whose vertices start with ``vertex``: adjacent ranks."""
    first, beyond = vertex << k, (vertex + 1) << k
    stop = fold.size if beyond == 1 << fold.dimensions else fold.rank(beyond)
    return recvbuf[fold.rank(first) : stop]
