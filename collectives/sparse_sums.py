"""Sums of pairs under way: the algorithms of the sparse all-reduce, and their messages."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

import numpy as np
from mpi4py import MPI

from collectives.algorithms.butterfly import Fold
from collectives.codec import shards, slices
from collectives.communicator import Communicator
from collectives.execution.traffic import Traffic
from collectives.execution.transport.mpi import Envelope
from collectives.phased import Part, Phased
from collectives.sparse_vectors import Array, Stream, add, packed, unpacked

#: In the header of a message, where the number of pairs would be: the vector follows.
_DENSE = -1


class PairSum(Phased):
    """A sum of pairs: by recursive doubling on vectors that grow, by parts, or in a ring.

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
        self._way, self._pruned = algorithm, list[tuple[Array, Array]]()
        self.algorithm = f"sparse {algorithm.replace('_', ' ')}"
        super().__init__(comm, [])
        self._mine = self.total = mine
        self._index_type, self._value_type = mine.indices.dtype, mine.values.dtype
        self._length, self._limit, self._tag = length, limit, tag
        self._channel = comm._engine.resources.channel
        self._envelope = comm._engine.settings.transport.envelope
        self._traffics = [t for t in (traffic, comm.traffic) if t is not None]

    def phases(self) -> Iterator[Part]:
        ways = {"split_allgather": self._split, "pruned_ring": self._ring}
        return ways.get(self._way, self._doubling)()

    @property
    def pruned(self) -> tuple[Array, Array]:
        """Pairs that this rank took off on the way of the last run; places in no order."""
        none = np.empty(0, self._index_type), np.empty(0, self._value_type)
        indices, values = zip(none, *self._pruned)
        return np.concatenate(indices), np.concatenate(values)

    def _parts(self) -> tuple[list[int], list[Stream]]:
        """Lengths of the ranks' parts of the places, and the pairs of each, counted from its
        start."""
        size, (indices, values) = self._channel.size, self._mine
        assert indices is not None, "callers give pairs"
        lengths = shards(self._length, size)
        first = np.array([place.start for place in slices(lengths)], np.uint64)
        ends = [*np.searchsorted(indices, first).tolist(), len(indices)]
        self._starts = first.astype(self._index_type)  # wraps behind all indices, where none are
        parts = [
            Stream(indices[low:high] - start, values[low:high])
            for low, high, start in zip(ends, ends[1:], self._starts)
        ]
        return lengths, parts

    def _whole(self, parts: list[Stream]) -> Stream:
        """The vector of these parts: pairs, if they are few enough."""
        at = [p.indices + low for p, low in zip(parts, self._starts) if p.indices is not None]
        if len(at) == len(parts) and sum(map(len, at)) <= self._limit:
            return Stream(np.concatenate(at), np.concatenate([part.values for part in parts]))
        vector = np.zeros(self._length, self._value_type)
        for part, place in zip(parts, slices(shards(self._length, len(parts)))):
            vector[place][... if part.indices is None else part.indices] = part.values
        return Stream(None, vector)

    def _split(self) -> Iterator[Part]:
        """Each rank sums its part of the places, in the order of ranks, and sends it to all."""
        rank, peers = self._channel.rank, [*range(self._channel.size)]
        del peers[rank]
        lengths, parts = self._parts()
        parts = [self._form(part, length) for part, length in zip(parts, lengths)]
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
        self.total = self._whole(parts)

    def _ring(self) -> Iterator[Part]:
        """A part goes round, and each rank prunes what it has added to; then the sums go round."""
        rank, size = self._channel.rank, self._channel.size
        lengths, parts = self._parts()
        self._pruned = []
        parts[rank] = self._prune(parts[rank], rank, lengths[rank])
        for hop in range(2 * (size - 1)):
            here, after = (rank - hop) % size, (rank - hop - 1) % size
            sending = self._send((rank + 1) % size, parts[here], lengths[here])
            found = yield from self._receive((rank - 1) % size, lengths[after])
            yield sending
            if hop < size - 1:
                found = self._prune(add(found, parts[after]), after, lengths[after])
            parts[after] = found
        self.total = self._whole(parts)

    def _prune(self, stream: Stream, part: int, length: int) -> Stream:
        """A part without its smallest pairs, beyond a p-th of those that this rank gave.

        A part that has become a vector takes as many bytes whatever is left out.
        """
        most = -(-len(self._mine.values) // self._channel.size)
        indices, values = stream
        if indices is None or len(indices) <= most:
            return self._form(stream, length)
        order = np.argsort(np.abs(values).astype(np.float64))  # NaN counts as largest
        left, kept = np.sort(order[: len(order) - most]), np.sort(order[len(order) - most :])
        self._pruned.append((indices[left] + self._starts[part], values[left]))
        return self._form(Stream(indices[kept], values[kept]), length)

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

    def _send(self, peer: int, stream: Stream, length: int) -> "Messages":
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

    def _started(self, peer: int, parts: list[Array], sends: bool) -> "Messages":
        """Messages to or from the peer."""
        start = self._channel.Isend if sends else self._channel.Irecv
        made = Messages(self._channel, None if sends else peer)
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


@dataclass
class Messages:
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
