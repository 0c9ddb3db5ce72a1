"""Floating-point reductions without an order: ``Communicator(..., reproducible=True)``.

Each rank gets all ranks' numbers for its slice of the result, adds them exactly, rounds once, and
sends the slice on: an all-to-all, :func:`~collectives.execution.exact.exact_sum`, and an
all-gather.  The traffic is that of a ring all-reduce, 2 s (p-1)/p bytes for p ranks of s bytes, and
the additions cost some twenty times as much.  As no partial sum is ever rounded, the bits depend
on the numbers alone: not on how many ranks have them, nor on who comes first.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from mpi4py import MPI

from collectives.algorithms import build
from collectives.calls.call import Call
from collectives.errors import InvalidBuffer, UnknownAlgorithm
from collectives.execution.exact import exact_sum, extreme
from collectives.execution.memory import Items
from collectives.execution.messages import Counts, Operands, bind
from collectives.execution.plan import Action, Binding, BoundRound, Plan
from collectives.execution.transport.mpi import MPITransport

#: How floating-point arrays are reduced without an order.
_WITHOUT_ORDER: list[tuple[MPI.Op, Callable[[Sequence[Items], Items], None]]] = [
    (MPI.SUM, exact_sum),
    (MPI.MAX, partial(extreme, np.maximum)),
    (MPI.MIN, partial(extreme, np.minimum)),
]
_WITH_NAN = (MPI.FLOAT_INT, MPI.DOUBLE_INT, MPI.LONG_DOUBLE_INT)


def is_rounded(call: Call) -> bool:
    """Whether a call's result would depend on the order of its operations.

    Raises:
        InvalidBuffer: it does and cannot be reproducible: for another operation, on a GPU, for long
            doubles.
        UnknownAlgorithm: an algorithm was asked for, whose order would decide.
    """
    dtype, op = call.buffer.items.dtype, call.op
    if op is None:
        return False
    if not op.is_predefined or (op in (MPI.MAXLOC, MPI.MINLOC) and _has_nan(call)):
        raise InvalidBuffer(
            f"{call.collective}: reproducible=True has no way to reduce by this operation, whose "
            "result may depend on the order; use another communicator for it"
        )
    if not (dtype.kind in "fc" or dtype.name.startswith(("bfloat", "float"))):
        if saturates(call) and call.algorithm == "native":
            raise UnknownAlgorithm(
                f"{call.collective}: MPI libraries let sums of {dtype} end at the largest one, so "
                "they depend on the order; with reproducible=True, leave the algorithm out"
            )
        return False
    why = ""
    if all(op != known for known, _ in _WITHOUT_ORDER):
        why = "has sums, maxima and minima of floating-point arrays, and no other operation"
    elif dtype.itemsize > (16 if dtype.kind == "c" else 8):
        why = f"has no exact sums of {dtype}; use float64"
    elif call.is_on_device:
        why = "reduces on the host; copy the array there first"
    if why:
        raise InvalidBuffer(f"{call.collective}: reproducible=True {why}")
    _ = call.combine  # raises for what MPI does not define
    if call.algorithm != "auto":
        raise UnknownAlgorithm(
            f"{call.collective}: with reproducible=True a sum has no order, so {call.algorithm!r} "
            "cannot be asked for; leave the algorithm out"
        )
    return True


def _has_nan(call: Call) -> bool:
    return call.buffer.datatype is None or call.buffer.datatype in _WITH_NAN


def saturates(call: Call) -> bool:
    """Whether the MPI library's own sum or product may saturate in one call and wrap in another, as
    Open MPI's do for numbers of 8 bits."""
    dtype = call.buffer.items.dtype
    return call.op in (MPI.SUM, MPI.PROD) and dtype.kind in "iu" and dtype.itemsize == 1


def bind_exact(call: Call, transport: MPITransport, operands: Operands, binding: Binding) -> Plan:
    """A plan for a reduction by exact sums."""
    return _ExactBinder(call, transport, operands, binding).plan()


class _ExactBinder:
    """The rounds of one call."""

    def __init__(
        self, call: Call, transport: MPITransport, operands: Operands, binding: Binding
    ) -> None:
        self.call = call
        self.transport = transport
        self.binding = binding
        self.reduce = next(way for op, way in _WITHOUT_ORDER if op == call.op)
        self.operands = operands
        given = self.operands.recv if self.operands.send is None else self.operands.send
        assert given is not None, "every rank has something to add"
        self.given = given
        self.size, self.rank = call.member.size, call.member.rank
        #: How many items of the result each rank sums.
        self.slices = self._slices()
        self.own = self.slices[self.rank]

    def _slices(self) -> tuple[int, ...]:
        if self.call.collective == "reduce_scatter":
            return tuple(self.call.counts.send) if self.call.counts else self._equal()
        length, longer = divmod(self.given.size, self.size)
        return tuple(length + (rank < longer) for rank in range(self.size))

    def _equal(self) -> tuple[int, ...]:
        return (self.call.count,) * self.size

    def plan(self) -> Plan:
        work = np.empty(self.size * self.own, self.given.dtype)
        terms = [work[i * self.own : (i + 1) * self.own] for i in range(self.size)]
        there = Counts(self.slices, (self.own,) * self.size)
        rounds = [BoundRound(starts=[*self.operands.before])]
        rounds += self._moved("alltoall", "pairwise", self.given, work, there)
        rounds += getattr(self, f"_{self.call.collective}")(terms)
        rounds.append(BoundRound(starts=[*self.operands.after]))
        call = self.call
        return Plan(
            call.collective,
            "exact",
            call.nbytes,
            [r for r in rounds if r.starts],
            self.transport.testall,
            self.binding,
        )

    def _reduce_scatter(self, terms: list[Items]) -> list[BoundRound]:
        recv = self.operands.recv
        assert recv is not None, "every rank of a reduce-scatter receives"
        return [BoundRound(starts=[partial(self.reduce, terms, recv)])]

    def _allreduce(self, terms: list[Items]) -> list[BoundRound]:
        total = np.empty_like(terms[0])
        back = Counts((self.own,), self.slices)
        moved = self._moved("allgather", "direct", total, self.operands.recv, back)
        return [BoundRound(starts=[partial(self.reduce, terms, total)]), *moved]

    def _reduce(self, terms: list[Items]) -> list[BoundRound]:
        total = np.empty_like(terms[0])
        back = Counts((self.own,), self.slices if self.call.member.is_root else ())
        recv = self.operands.recv if self.call.member.is_root else None
        moved = self._moved("gather", "direct", total, recv, back, self.call.root)
        return [BoundRound(starts=[partial(self.reduce, terms, total)]), *moved]

    def _scan(self, terms: list[Items]) -> list[BoundRound]:
        return self._prefixes(terms, first=0)

    def _exscan(self, terms: list[Items]) -> list[BoundRound]:
        return self._prefixes(terms, first=1)

    def _prefixes(self, terms: list[Items], first: int) -> list[BoundRound]:
        """Rank k gets the sum of all ranks before it, and of its own unless ``first`` is 1."""
        sums = np.empty(self.size * self.own, self.given.dtype)
        parts = [sums[i * self.own : (i + 1) * self.own] for i in range(self.size - first)]
        actions: list[Action] = [
            partial(self.reduce, terms[: k + 1], part) for k, part in enumerate(parts)
        ]
        sent = tuple(self.own if rank >= first else 0 for rank in range(self.size))
        received = self.slices if self.rank >= first else (0,) * self.size
        back = Counts(sent, received)
        moved = self._moved("alltoall", "pairwise", sums, self.operands.recv, back)
        return [BoundRound(starts=actions), *moved]

    def _moved(
        self,
        collective: str,
        algorithm: str,
        send: Items,
        recv: Items | None,
        counts: Counts,
        root: int = 0,
    ) -> list[BoundRound]:
        """The rounds of a collective that moves blocks of these lengths."""
        schedule = build(collective, algorithm, self.size, root)
        operands = Operands(send, recv, counts)
        return bind(schedule, self.transport, operands, None, self.binding).rounds
