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
from collectives.codec import shards
from collectives.errors import InvalidBuffer, UnknownAlgorithm
from collectives.execution.exact import exact_sum, extreme
from collectives.execution.memory import Items
from collectives.execution.messages import Counts, Operands, bind
from collectives.execution.plan import Binding, BoundRound, Plan
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
    may_be_nan = call.buffer.datatype is None or call.buffer.datatype in _WITH_NAN
    if not op.is_predefined or (op in (MPI.MAXLOC, MPI.MINLOC) and may_be_nan):
        raise InvalidBuffer(
            f"{call.collective}: reproducible=True has no way to reduce by this operation, whose "
            "result may depend on the order; use another communicator for it"
        )
    if not (dtype.kind in "fc" or dtype.name.startswith(("bfloat", "float"))):
        if call.wraps and call.algorithm == "native":
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


def bind_exact(call: Call, transport: MPITransport, operands: Operands, binding: Binding) -> Plan:
    """A plan for a reduction by exact sums."""
    reduce = next(way for op, way in _WITHOUT_ORDER if op == call.op)
    size, rank, recv = call.member.size, call.member.rank, operands.recv
    given = recv if operands.send is None else operands.send
    assert given is not None, "every rank has something to add"
    slices = _slices(call, given.size)
    own, dtype = slices[rank], given.dtype

    def moved(
        how: tuple[str, str], send: Items, recv: Items | None, counts: Counts
    ) -> list[BoundRound]:
        schedule = build(*how, size, call.root if how[0] == "gather" else 0)
        return bind(schedule, transport, Operands(send, recv, counts), None, binding).rounds

    exchange = ("alltoall", "pairwise")
    work, total = np.empty(size * own, dtype), np.empty(own, dtype)
    terms = [*work.reshape(size, own)]
    rounds = [BoundRound(starts=[*operands.before])]
    rounds += moved(exchange, given, work, Counts(slices, (own,) * size))
    match call.collective:
        case "reduce_scatter":
            assert recv is not None, "every rank of a reduce-scatter receives"
            rounds.append(BoundRound(starts=[partial(reduce, terms, recv)]))
        case "scan" | "exscan":
            # Rank k gets the sum of the ranks before it, with its own numbers in a scan.
            first = int(call.collective == "exscan")
            sums = np.empty((size, own), dtype)
            prefixes = (partial(reduce, terms[: k + 1], sums[k]) for k in range(size - first))
            rounds.append(BoundRound(starts=[*prefixes]))
            sent = tuple(own if receiver >= first else 0 for receiver in range(size))
            received = slices if rank >= first else (0,) * size
            rounds += moved(exchange, sums.reshape(-1), recv, Counts(sent, received))
        case collective:
            rounds.append(BoundRound(starts=[partial(reduce, terms, total)]))
            how = ("gather" if collective == "reduce" else "allgather", "direct")
            gets = collective == "allreduce" or call.member.is_root
            counts = Counts((own,), slices if gets else ())
            rounds += moved(how, total, recv if gets else None, counts)
    rounds.append(BoundRound(starts=[*operands.after]))
    rounds = [bound for bound in rounds if bound.starts]
    return Plan(call.collective, "exact", call.nbytes, rounds, transport.testall, binding)


def _slices(call: Call, items: int) -> tuple[int, ...]:
    """Items of the result that each rank sums."""
    size = call.member.size
    if call.collective == "reduce_scatter":
        return tuple(call.counts.send) if call.counts else (call.count,) * size
    return tuple(shards(items, size))
