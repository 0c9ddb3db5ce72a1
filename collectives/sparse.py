"""Sparse all-reduce: vectors of few non-zeros travel as pairs of index and value.

Recursive doubling in which what travels grows: two lists of pairs are merged, and where the pairs
come to take more bytes than the vector, the vector itself takes their place.

Renggli, Ashkboos, Aghagolzadeh, Alistarh, Hoefler: "SparCML: high-performance sparse communication
for machine learning", SC 2019 (their SSAR_Recursive_double, with the switch of their DSAR).
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from collectives.algorithms.butterfly import Fold
from collectives.communicator import Communicator
from collectives.errors import CollectiveError, InvalidBuffer
from collectives.execution.messages import TAGS_PER_PLAN
from collectives.execution.tags import Tags
from collectives.execution.traffic import Traffic
from collectives.execution.transport.mpi import Envelope, largest_tag
from collectives.phased import Part, Phased
from collectives.sparse_vectors import Array, Stream, add, agreed, expect_rising

#: In the header of a message, where the number of pairs would be: the vector follows.
_DENSE = -1


def sparse_allreduce(
    comm: MPI.Intracomm,
    indices: npt.ArrayLike,
    values: npt.ArrayLike,
    length: int,
    *,
    dense_at: int | None = None,
    traffic: Traffic | None = None,
) -> tuple[Array, Array] | Array:
    """The sum over all ranks of vectors of ``length`` numbers, each given by its pairs.

    Bitwise the same on all ranks: partial sums are of neighbouring ranks, the lower ones on the
    left.  A sum that comes to 0 keeps its pair.  Sums of 16-bit numbers are rounded in every round.

    Cost: ceil(log2 p) rounds, two more where p is no power of two; in round k, the pairs of 2^k
    ranks merged, or ``length`` values if they are fewer bytes; and one all-gather of some 100 bytes
    a rank, by which the ranks agree that the calls belong together.

    Args:
        comm: a :class:`~collectives.Communicator`, or any other, which is duplicated for the call.
        indices: shape (pairs,), uint32 or uint64, rising; their number may differ between ranks.
        values: shape (pairs,), floating point or complex, ml_dtypes' types too.
        length: length of the vectors; the same on all ranks, as are the types.
        dense_at: pairs above which a vector travels, and is returned, as it is; the same on all
            ranks.  Default: where the pairs take more bytes than
            the vector.
        traffic: counts what is sent.

    Returns:
        ``(indices, values)`` of the sum, or all its ``length`` values; the same form on all ranks.

    Raises:
        InvalidBuffer: on all ranks, if one has indices that are not rising or not below ``length``,
            arrays of other types or shapes, or a ``length``, ``dense_at`` or ``traffic`` that
            cannot be.
        MismatchError: on all ranks, if they differ in length, types or ``dense_at``.
    """
    with _ours(comm) as own:
        mine, length, limit = agreed(own._engine, indices, values, length, dense_at, traffic)
        run = _Sum(own, mine, length, limit, traffic, largest_tag())
        run.Start()
        run.Wait()
    total = run.total
    return total.values if total.indices is None else (total.indices, total.values)


class _Sum(Phased):
    """A sum of pairs, by recursive doubling on vectors that grow.

    On the wire, a vector is a header of 8 bytes that says how many pairs follow, or that the vector
    does.

    Attributes:
        total: the sum of the last run: pairs, or the vector with ``indices`` ``None``.
    """

    algorithm = "sparse recursive doubling"

    def __init__(
        self,
        comm: Communicator,
        mine: Stream,
        length: int,
        limit: int,
        traffic: Traffic | None,
        tag: int,
    ) -> None:
        """Its messages have ``tag``; ``limit`` is the most pairs that travel as such."""
        assert mine.indices is not None, "callers give pairs"
        super().__init__(comm, [])
        self._mine = self.total = mine
        self._index_type, self._value_type = mine.indices.dtype, mine.values.dtype
        self._length, self._limit, self._tag = length, limit, tag
        self._channel = comm._engine.resources.channel
        self._envelope = comm._engine.settings.transport.envelope
        self._traffics = [t for t in (traffic, comm.traffic) if t is not None]

    def phases(self) -> Iterator[Part]:
        rank, fold = self._channel.rank, Fold(self._channel.size)
        held = self._form(self._mine)
        if fold.sits_out(rank):
            yield self._send(rank - 1, held)
            self.total = yield from self._receive(rank - 1)
            return
        if fold.is_doubled(rank):
            theirs = yield from self._receive(rank + 1)
            held = self._form(add(held, theirs))
        for k in range(fold.dimensions):
            peer = fold.rank(fold.vertex(rank) ^ (1 << k))
            sending = self._send(peer, held)
            theirs = yield from self._receive(peer)
            yield sending
            held = self._form(add(held, theirs) if rank < peer else add(theirs, held))
        if fold.is_doubled(rank):
            yield self._send(rank + 1, held)
        self.total = held

    def _form(self, stream: Stream) -> Stream:
        """``stream``, as the vector that it is if there are too many pairs."""
        if stream.indices is None or len(stream.indices) <= self._limit:
            return stream
        values = np.zeros(self._length, self._value_type)
        values[stream.indices] = stream.values
        return Stream(None, values)

    def _send(self, peer: int, stream: Stream) -> "_Messages":
        """Starts to send it."""
        pairs = _DENSE if stream.indices is None else len(stream.indices)
        parts = [p for p in (np.array([pairs]), stream.indices, stream.values) if p is not None]
        for traffic in self._traffics:
            traffic.send(len(parts) - 1, sum(part.nbytes for part in parts))
            traffic.dense += self._length * self._value_type.itemsize
        return self._started(peer, parts, sends=True)

    def _receive(self, peer: int) -> Generator[Part, None, Stream]:
        """Receives a vector from the peer."""
        header = np.empty(1, np.int64)
        yield self._started(peer, [header], sends=False)
        pairs = int(header[0])
        if pairs == _DENSE:
            values = np.empty(self._length, self._value_type)
            yield self._started(peer, [values], sends=False)
            return Stream(None, values)
        indices, values = np.empty(pairs, self._index_type), np.empty(pairs, self._value_type)
        yield self._started(peer, [indices, values], sends=False)
        return Stream(indices, values)

    def _started(self, peer: int, parts: list[Array], sends: bool) -> "_Messages":
        """Messages to or from the peer."""
        start = self._channel.Isend if sends else self._channel.Irecv
        made = _Messages(self._channel, None if sends else peer)
        for part in parts:
            data = part.view(np.uint8)
            envelope = self._envelope(data)
            if envelope:
                made.envelopes.append(envelope)
                if sends:
                    envelope.seal()
            message = envelope.message if envelope else [data, data.nbytes, MPI.BYTE]
            made.requests.append(start(message, peer, self._tag))
        return made


class SparseAllreduce(_Sum):
    """The plan of a sparse all-reduce: what :func:`sparse_allreduce` does, to be started again and
    again with other pairs.

    The ranks agree on length and types when it is made, and never again; its messages have tags of
    their own.
    """

    def __init__(self, comm: Communicator, length: int, dtype: npt.DTypeLike) -> None:
        """Binds it; collective.  Arguments as those of :func:`sparse_allreduce`.

        Raises:
            InvalidBuffer, MismatchError: on all ranks, as there.
            CollectiveError: there are more plans than tags, or sums are reproducible here.
        """
        with _ours(comm) as own:
            nothing = np.empty(0, np.uint32), np.empty(0, dtype)
            mine, size, limit = agreed(own._engine, *nothing, length, None, None)
            tags = own._engine.resources.take_tags()
        self._tags: Tags | None = tags
        super().__init__(own, mine, size, limit, None, (tags.number + 1) * TAGS_PER_PLAN)

    def give(self, indices: Array, values: Array) -> None:
        """Sets the pairs of the next run, which the caller leaves alone until it is complete.

        Args:
            indices: shape (pairs,), uint32, rising and below the length.
            values: shape (pairs,), of the plan's type.

        Raises:
            InvalidBuffer: on this rank, before anything is sent; they are no such pairs.
        """
        kinds = self._index_type, self._value_type
        if (
            (indices.dtype, values.dtype) != kinds
            or indices.ndim != 1
            or (indices.shape != values.shape)
        ):
            raise InvalidBuffer(
                f"pairs of this plan are as many indices of {kinds[0]} as values of {kinds[1]}, "
                f"not {indices.shape} of {indices.dtype} and {values.shape} of {values.dtype}"
            )
        expect_rising(indices, self._length)
        self._mine = Stream(indices, values)

    @property
    def given(self) -> int:
        """Bytes of the pairs that were given last."""
        indices, values = self._mine
        return values.nbytes + (0 if indices is None else indices.nbytes)

    def Free(self) -> None:
        """Gives its tags back.

        Raises:
            RuntimeError: it is under way.
        """
        super().Free()
        self._tags = None


@dataclass
class _Messages:
    """Messages under way, as a part of a sum; ``source`` is the sender of those that arrive."""

    channel: MPI.Intracomm
    source: int | None
    requests: list[MPI.Request] = field(default_factory=list)
    envelopes: list[Envelope] = field(default_factory=list)

    def Start(self) -> None:
        """Does nothing: they have been started."""

    def Test(self) -> bool:
        """Returns whether all are there."""
        if not MPI.Request.Testall(self.requests):
            return False
        if not all(envelope.is_there() for envelope in self.envelopes):
            return False
        while self.envelopes:
            envelope = self.envelopes.pop()
            if self.source is not None:
                envelope.check(self.channel, self.source)
            envelope.free()
        return True


@contextmanager
def _ours(comm: MPI.Intracomm) -> Iterator[Communicator]:
    """``comm``, or one of ours on it for this call."""
    if isinstance(comm, Communicator):
        if comm.is_reproducible:
            raise CollectiveError(
                "sparse_allreduce sums in an order of its own, which reproducible=True excludes; "
                "use another communicator for it"
            )
        yield comm
        return
    ours = Communicator(comm)
    try:
        yield ours
    except CollectiveError:  # on all ranks, so that they can free it together
        ours.close()
        raise
    ours.close()
