"""Sparse all-reduce: vectors of few non-zeros travel as pairs of index and value.

Recursive doubling in which what travels grows: two lists of pairs are merged, and where the pairs
come to take more bytes than the vector, the vector itself takes their place.

Renggli, Ashkboos, Aghagolzadeh, Alistarh, Hoefler: "SparCML: high-performance sparse communication
for machine learning", SC 2019 (their SSAR_Recursive_double, with the switch of their DSAR).
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from collectives.algorithms.butterfly import Fold
from collectives.calls.engine import Engine
from collectives.coded import Part, Phased
from collectives.communicator import Communicator
from collectives.errors import CollectiveError, InvalidBuffer
from collectives.execution.messages import TAGS_PER_PLAN
from collectives.execution.pairs import Array, Stream, add
from collectives.execution.tags import Tags
from collectives.execution.traffic import Traffic
from collectives.execution.transport import Bytes
from collectives.execution.transport.mpi import Envelope, largest_tag
from collectives.sparse_arguments import agreed, expect_rising

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
    ranks merged, or ``length`` values if they are fewer bytes; and one all-reduce of 72 bytes by
    which the ranks agree that the calls belong together.

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
    with _engine(comm) as engine:
        mine, length, limit = agreed(engine, indices, values, length, dense_at, traffic)
        assert mine.indices is not None, "callers give pairs"
        types = mine.indices.dtype, mine.values.dtype
        exchange = _Exchange(engine, types, length, limit, traffic, largest_tag())
        messages = _recursive_doubling(exchange, mine)
        try:
            while True:
                _Messages(engine, next(messages)).Wait()
        except StopIteration as ended:
            total: Stream = ended.value
    return total.values if total.indices is None else (total.indices, total.values)


class SparseAllreduce(Phased):
    """The plan of a sparse all-reduce: what :func:`sparse_allreduce` does, to be started again and
    again with other pairs.

    The ranks agree on length and types when it is made, and never again; its messages have tags of
    their own.

    Attributes:
        total: the sum of the last run: pairs, or the vector with ``indices`` ``None``.
    """

    algorithm = "sparse recursive doubling"

    def __init__(
        self,
        comm: Communicator,
        length: int,
        dtype: npt.DTypeLike,
        *,
        dense_at: int | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        """Binds it; collective.  Arguments as those of :func:`sparse_allreduce`.

        Raises:
            InvalidBuffer, MismatchError: on all ranks, as there.
            CollectiveError: there are more plans than tags, or sums are reproducible here.
        """
        with _engine(comm) as engine:
            nothing = np.empty(0, np.uint32), np.empty(0, dtype)
            mine, size, limit = agreed(engine, *nothing, length, dense_at, traffic)
            tags = engine.tags()
        types = nothing[0].dtype, mine.values.dtype
        tag = (tags.number + 1) * TAGS_PER_PLAN
        self._exchange = _Exchange(engine, types, size, limit, traffic, tag)
        self._tags: Tags | None = tags
        self._mine = self.total = mine
        super().__init__(comm, [])

    def give(self, indices: Array, values: Array) -> None:
        """Sets the pairs of the next run, which the caller leaves alone until it is complete.

        Args:
            indices: shape (pairs,), uint32, rising and below the length.
            values: shape (pairs,), of the plan's type.

        Raises:
            InvalidBuffer: on this rank, before anything is sent; they are no such pairs.
        """
        kinds = self._exchange.index_type, self._exchange.value_type
        if (
            (indices.dtype, values.dtype) != kinds
            or indices.ndim != 1
            or (indices.shape != values.shape)
        ):
            raise InvalidBuffer(
                f"pairs of this plan are as many indices of {kinds[0]} as values of {kinds[1]}, "
                f"not {indices.shape} of {indices.dtype} and {values.shape} of {values.dtype}"
            )
        expect_rising(indices, self._exchange.length)
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

    def phases(self) -> Iterator[Part]:
        messages = _recursive_doubling(self._exchange, self._mine)
        try:
            while True:
                yield _Messages(self._exchange.engine, next(messages))
        except StopIteration as ended:
            self.total = ended.value


class _Message(NamedTuple):
    """A message under way; ``source`` is the sender of one that arrives."""

    request: MPI.Request
    envelope: Envelope | None
    source: int | None = None


@dataclass
class _Messages:
    """Messages under way."""

    engine: Engine
    messages: list[_Message]

    def Start(self) -> None:
        """Does nothing: they have been started."""

    def Test(self) -> bool:
        if not MPI.Request.Testall([message.request for message in self.messages]):
            return False
        return self._open()

    def Wait(self) -> None:
        self.engine.complete(*(message.request for message in self.messages))
        while not self._open():
            self.engine.progress.advance()

    def _open(self) -> bool:
        """Whether all are there, once MPI has them."""
        waiting = [m for m in self.messages if m.envelope and not m.envelope.is_there()]
        if waiting:
            return False
        while self.messages:
            _, envelope, source = self.messages.pop()
            if envelope:
                if source is not None:
                    envelope.check(self.engine.channel, source)
                envelope.free()
        return True


#: Yields messages to wait for.
_Steps = Generator[list[_Message], None, Stream]


def _recursive_doubling(exchange: "_Exchange", mine: Stream) -> _Steps:
    """As :func:`collectives.algorithms.butterfly.recursive_doubling`, on vectors that grow."""
    rank, fold = exchange.rank, Fold(exchange.size)
    held = exchange.form(mine)
    if fold.sits_out(rank):
        yield exchange.send(rank - 1, held)
        return (yield from exchange.receive(rank - 1))
    if fold.is_doubled(rank):
        theirs = yield from exchange.receive(rank + 1)
        held = exchange.form(add(held, theirs))
    for k in range(fold.dimensions):
        peer = fold.rank(fold.vertex(rank) ^ (1 << k))
        sending = exchange.send(peer, held)
        theirs = yield from exchange.receive(peer)
        yield sending
        held = exchange.form(add(held, theirs) if rank < peer else add(theirs, held))
    if fold.is_doubled(rank):
        yield exchange.send(rank + 1, held)
    return held


class _Exchange:
    """Vectors on the wire: a header of 8 bytes that says how many pairs follow, or the vector."""

    def __init__(
        self,
        engine: Engine,
        types: "tuple[np.dtype[Any], np.dtype[Any]]",
        length: int,
        limit: int,
        traffic: Traffic | None,
        tag: int,
    ) -> None:
        """Makes messages; ``types`` are the MPI types of indices and of values."""
        self.engine = engine
        self.channel = engine.channel
        self.rank, self.size = self.channel.rank, self.channel.size
        self.tag = tag
        self.index_type, self.value_type = types
        self.length, self.limit = length, limit
        self.traffics = [t for t in (traffic, engine.progress.traffic) if t is not None]

    def form(self, stream: Stream) -> Stream:
        """``stream``, as the vector that it is if there are too many pairs."""
        if stream.indices is None or len(stream.indices) <= self.limit:
            return stream
        values = np.zeros(self.length, self.value_type)
        values[stream.indices] = stream.values
        return Stream(None, values)

    def send(self, peer: int, stream: Stream) -> list[_Message]:
        """Starts to send it."""
        pairs = _DENSE if stream.indices is None else len(stream.indices)
        parts = [np.array([pairs]), stream.indices, stream.values]
        messages = [part.view(np.uint8) for part in parts if part is not None]
        for traffic in self.traffics:
            traffic.send(len(messages) - 1, sum(message.nbytes for message in messages))
            traffic.dense += self.length * self.value_type.itemsize
        return [self._sending(peer, message) for message in messages]

    def receive(self, peer: int) -> _Steps:
        """Receives a vector from the peer."""
        header = np.empty(1, np.int64)
        yield [self._receiving(peer, header)]
        pairs = int(header[0])
        if pairs == _DENSE:
            values = np.empty(self.length, self.value_type)
            yield [self._receiving(peer, values)]
            return Stream(None, values)
        indices, values = np.empty(pairs, self.index_type), np.empty(pairs, self.value_type)
        yield [self._receiving(peer, indices), self._receiving(peer, values)]
        return Stream(indices, values)

    def _sending(self, peer: int, data: Bytes) -> _Message:
        envelope = self.engine.settings.transport.envelope(data)
        if envelope:
            envelope.seal()
        message = envelope.message if envelope else [data, data.nbytes, MPI.BYTE]
        return _Message(self.channel.Isend(message, peer, self.tag), envelope)

    def _receiving(self, peer: int, items: Array) -> _Message:
        data = items.view(np.uint8)
        envelope = self.engine.settings.transport.envelope(data)
        message = envelope.message if envelope else [data, data.nbytes, MPI.BYTE]
        return _Message(self.channel.Irecv(message, peer, self.tag), envelope, peer)


@contextmanager
def _engine(comm: MPI.Intracomm) -> Iterator[Engine]:
    """The engine of ``comm``; a communicator that is not ours gets one for this call."""
    if isinstance(comm, Communicator):
        if comm._engine.settings.reproducible:
            raise CollectiveError(
                "sparse_allreduce sums in an order of its own, which reproducible=True excludes; "
                "use another communicator for it"
            )
        yield comm._engine
        return
    ours = Communicator(comm)
    try:
        yield ours._engine
    except CollectiveError:  # on all ranks, so that they can free it together
        ours.close()
        raise
    ours.close()
