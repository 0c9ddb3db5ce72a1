"""Sparse all-reduce: vectors of few non-zeros travel as pairs of index and value.

Recursive doubling in which what travels grows: two lists of pairs are merged, and where the pairs
come to take more bytes than the vector, the vector itself takes their place.  Or the split: each
rank sums a part of the places, and all gather the parts, as pairs or as they are.

Renggli, Ashkboos, Aghagolzadeh, Alistarh, Hoefler: "SparCML: high-performance sparse communication
for machine learning", SC 2019 (their SSAR_Recursive_double and SSAR_Split_allgather, with the
switch of their DSAR).
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from collectives.algorithms.butterfly import Fold
from collectives.codec import shards, slices
from collectives.communicator import Communicator
from collectives.errors import CollectiveError, InvalidBuffer
from collectives.execution.messages import TAGS_PER_PLAN
from collectives.execution.tags import Tags
from collectives.execution.traffic import Traffic
from collectives.execution.transport.mpi import Envelope, largest_tag
from collectives.phased import Part, Phased
from collectives.sparse_vectors import Array, Stream, add, agreed, expect_rising, packed, unpacked

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
    algorithm: str = "recursive_doubling",
) -> tuple[Array, Array] | Array:
    """The sum over all ranks of vectors of ``length`` numbers, each given by its pairs.

    Bitwise the same on all ranks: partial sums are of neighbouring ranks, the lower ones on the
    left.  A sum that comes to 0 keeps its pair.  Sums of 16-bit numbers are rounded in every round.
    An index travels as the gap before it, in 2 bytes, and where 65,535 places or more lie between
    two, in 2 and its own.

    Cost: ceil(log2 p) rounds, two more where p is no power of two; in round k, the pairs of 2^k
    ranks merged, or ``length`` values if they are fewer bytes.  By ``split_allgather``: the pairs
    once, to the ranks that sum them, and (p-1)/p times the pairs of all ranks merged, or so much of
    ``length`` values; 2 (p-1) messages a rank.  And one all-gather of some 100 bytes a rank, by
    which the ranks agree that the calls belong together.

    Args:
        comm: a :class:`~collectives.Communicator`, or any other, which is duplicated for the call.
        indices: shape (pairs,), uint32 or uint64, rising; their number may differ between ranks.
        values: shape (pairs,), floating point or complex, ml_dtypes' types too.
        length: length of the vectors; the same on all ranks, as are the types.
        dense_at: pairs above which a vector travels, and is returned, as it is; the same on all
            ranks.  Default: where the pairs take more bytes than
            the vector.  A part of ``split_allgather`` has its share of them.
        traffic: counts what is sent.
        algorithm: ``recursive_doubling``, for few pairs; ``split_allgather``, for many, or where
            the ranks have the same places; the same on all ranks.

    Returns:
        ``(indices, values)`` of the sum, or all its ``length`` values; the same form on all ranks.

    Raises:
        InvalidBuffer: on all ranks, if one has indices that are not rising or not below ``length``,
            arrays of other types or shapes, or a ``length``, ``dense_at``, ``traffic`` or
            ``algorithm`` that cannot be.
        MismatchError: on all ranks, if they differ in length, types, ``dense_at``, ``algorithm``.
    """
    with _ours(comm) as own:
        mine, length, limit = agreed(
            own._engine, indices, values, length, dense_at, traffic, algorithm
        )
        run = _Sum(own, mine, length, limit, traffic, largest_tag(), algorithm)
        run.Start()
        run.Wait()
    total = run.total
    return total.values if total.indices is None else (total.indices, total.values)


class _Sum(Phased):
    """A sum of pairs, by recursive doubling on vectors that grow, or by parts.

    On the wire, a vector is a header of 16 bytes that says how many pairs follow, with how many
    bytes of indices, or that the vector does.

    Attributes:
        total: the sum of the last run: pairs, or the vector with ``indices`` ``None``.
    """

    def __init__(
        self,
        comm: Communicator,
        mine: Stream,
        length: int,
        limit: int,
        traffic: Traffic | None,
        tag: int,
        algorithm: str,
    ) -> None:
        """Its messages have ``tag``; ``limit`` is the most pairs that travel as such."""
        assert mine.indices is not None, "callers give pairs"
        self._splits = algorithm == "split_allgather"
        self.algorithm = f"sparse {algorithm.replace('_', ' ')}"
        super().__init__(comm, [])
        self._mine = self.total = mine
        self._index_type, self._value_type = mine.indices.dtype, mine.values.dtype
        self._length, self._limit, self._tag = length, limit, tag
        self._channel = comm._engine.resources.channel
        self._envelope = comm._engine.settings.transport.envelope
        self._traffics = [t for t in (traffic, comm.traffic) if t is not None]

    def phases(self) -> Iterator[Part]:
        return self._split() if self._splits else self._doubling()

    def _split(self) -> Iterator[Part]:
        """Each rank sums its part of the places, in the order of ranks, and sends it to all."""
        rank, size, (indices, values) = self._channel.rank, self._channel.size, self._mine
        assert indices is not None, "callers give pairs"
        lengths, peers = shards(self._length, size), [*range(self._channel.size)]
        del peers[rank]
        places = slices(lengths)
        first = np.array([place.start for place in places], np.uint64)
        ends = [*np.searchsorted(indices, first).tolist(), len(indices)]
        starts = first.astype(self._index_type)  # wraps behind all indices, in parts without any
        parts = [
            self._form(Stream(indices[low:high] - start, values[low:high]), length)
            for low, high, start, length in zip(ends, ends[1:], starts, lengths)
        ]
        sending = [self._send(peer, parts[peer], lengths[peer]) for peer in peers]
        for peer in peers:
            parts[peer] = yield from self._receive(peer, lengths[rank])
        total = parts[0]
        for part in parts[1:]:
            total = self._form(add(total, part), lengths[rank])
        sending += [self._send(peer, total, lengths[rank]) for peer in peers]
        parts[rank] = total
        for peer in peers:
            parts[peer] = yield from self._receive(peer, lengths[peer])
        yield from sending
        at = [own.indices + low for own, low in zip(parts, starts) if own.indices is not None]
        if len(at) == size and sum(map(len, at)) <= self._limit:
            self.total = Stream(np.concatenate(at), np.concatenate([part.values for part in parts]))
            return
        vector = np.zeros(self._length, self._value_type)
        for part, place in zip(parts, places):
            vector[place][... if part.indices is None else part.indices] = part.values
        self.total = Stream(None, vector)

    def _doubling(self) -> Iterator[Part]:
        rank, fold, n = self._channel.rank, Fold(self._channel.size), self._length
        held = self._form(self._mine, n)
        if fold.sits_out(rank):
            yield self._send(rank - 1, held, n)
            self.total = yield from self._receive(rank - 1, n)
            return
        if fold.is_doubled(rank):
            theirs = yield from self._receive(rank + 1, n)
            held = self._form(add(held, theirs), n)
        for k in range(fold.dimensions):
            peer = fold.rank(fold.vertex(rank) ^ (1 << k))
            sending = self._send(peer, held, n)
            theirs = yield from self._receive(peer, n)
            yield sending
            held = self._form(add(held, theirs) if rank < peer else add(theirs, held), n)
        if fold.is_doubled(rank):
            yield self._send(rank + 1, held, n)
        self.total = held

    def _form(self, stream: Stream, length: int) -> Stream:
        """``stream``, as the vector that it is if there are too many pairs for its length."""
        if stream.indices is None or len(stream.indices) * self._length <= self._limit * length:
            return stream
        values = np.zeros(length, self._value_type)
        values[stream.indices] = stream.values
        return Stream(None, values)

    def _send(self, peer: int, stream: Stream, length: int) -> "_Messages":
        """Starts to send it, a vector or a part of one."""
        if stream.indices is None:
            parts = [np.array([_DENSE, 0]), stream.values]
        else:
            data = packed(stream.indices)
            parts = [np.array([len(stream.indices), data.nbytes]), data, stream.values]
        for traffic in self._traffics:
            traffic.send(len(parts) - 1, sum(part.nbytes for part in parts))
            traffic.dense += length * self._value_type.itemsize
        return self._started(peer, parts, sends=True)

    def _receive(self, peer: int, length: int) -> Generator[Part, None, Stream]:
        """Receives a vector, or a part of one, from the peer."""
        header = np.empty(2, np.int64)
        yield self._started(peer, [header], sends=False)
        pairs, nbytes = header.tolist()
        if pairs == _DENSE:
            values = np.empty(length, self._value_type)
            yield self._started(peer, [values], sends=False)
            return Stream(None, values)
        data, values = np.empty(nbytes, np.uint8), np.empty(pairs, self._value_type)
        yield self._started(peer, [data, values], sends=False)
        return Stream(unpacked(data, pairs, self._index_type), values)

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

    def __init__(
        self,
        comm: Communicator,
        length: int,
        dtype: npt.DTypeLike,
        algorithm: str = "recursive_doubling",
    ) -> None:
        """Binds it; collective.  Arguments as those of :func:`sparse_allreduce`.

        Raises:
            InvalidBuffer, MismatchError: on all ranks, as there.
            CollectiveError: there are more plans than tags, or sums are reproducible here.
        """
        with _ours(comm) as own:
            nothing = np.empty(0, np.uint32), np.empty(0, dtype)
            mine, size, limit = agreed(own._engine, *nothing, length, None, None, algorithm)
            tags = own._engine.resources.take_tags()
        self._tags: Tags | None = tags
        tag = (tags.number + 1) * TAGS_PER_PLAN
        super().__init__(own, mine, size, limit, None, tag, algorithm)

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
        self._mine = Stream(indices, np.ascontiguousarray(values))

    @property
    def given(self) -> int:
        """Bytes of the pairs that were given last."""
        indices, values = self._mine
        return values.nbytes + (0 if indices is None else packed(indices).nbytes)

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
