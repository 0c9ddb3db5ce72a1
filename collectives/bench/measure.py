"""Times bound plans beside the MPI library's collective, and checks what they compute."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.bench import inputs
from collectives.communicator import AnyPlan, Communicator
from collectives.contracts import contract, place

#: Without ``--iters``, one repeat of one algorithm takes about this many seconds.
BUDGET_S = 0.02
MOST_ITERS = 2000


@dataclass(frozen=True)
class Case:
    """What is measured: one collective on one size, by several algorithms.

    Attributes:
        nbytes: of the larger buffer, rounded down to whole items and blocks.
        memory: ``"numpy"``, or ``"shared"`` for arrays of ``Communicator.empty``.
        average: how the ranks' times become one: 0 rank 0, 1 mean, 2 least, 3 largest.
    """

    collective: str
    nbytes: int
    dtype: np.dtype[Any]
    op: str
    algorithms: list[str]
    in_place: bool
    memory: str
    iters: int | None
    warmup: int
    repeats: int
    check: bool
    average: int


@dataclass
class Result:
    """One algorithm at one size; times are microseconds a call, one for each repeat."""

    collective: str
    algorithm: str
    ran: str
    reason: str
    bytes: int
    count: int
    dtype: str
    op: str
    in_place: bool
    memory: str
    ranks: int
    iters: int
    times_us: list[float] = field(default_factory=list)
    wrong: int | None = None

    @property
    def time_us(self) -> float:
        """Median over the repeats."""
        return float(np.median(self.times_us))

    @property
    def algbw(self) -> float:
        """GB/s: bytes over time."""
        return self.bytes / self.time_us / 1e3

    @property
    def busbw(self) -> float:
        """GB/s on the busiest link of an ideal algorithm; comparable between numbers of ranks."""
        return self.algbw * contract(self.collective).traffic(self.ranks)


def measure(comm: Communicator, case: Case) -> list[Result]:
    """Results in the order of ``case.algorithms``.  Collective.

    The algorithms take turns within each repeat, so that a drift of the machine meets all alike.
    An algorithm that cannot run this type (native float16 on some MPIs) is left out.
    """
    if case.collective == "broadcast":  # MPI has no other
        case = replace(case, in_place=True)
    blocks = contract(case.collective)
    size, rank = comm.size, comm.rank
    largest = max(blocks.send_blocks(size), blocks.recv_blocks(size))
    count = case.nbytes // case.dtype.itemsize // largest
    allocate: Callable[..., Any] = comm.empty if case.memory == "shared" else np.zeros
    send = allocate(count * blocks.send_blocks(size), case.dtype)
    recv = allocate(count * blocks.recv_blocks(size), case.dtype)
    own = recv
    if case.in_place:
        first = place(blocks, rank, 1) * count
        own = recv[first : first + send.size]
    plans: dict[str, AnyPlan] = {}
    for algorithm in case.algorithms:
        if algorithm != "native" or MPI._typedict.get(case.dtype.char):
            plans[algorithm] = _plan(comm, case, algorithm, None if case.in_place else send, recv)
    results = []
    for algorithm, plan in plans.items():
        result = Result(
            case.collective,
            algorithm,
            plan.algorithm,
            plan.reason,
            max(send.nbytes, recv.nbytes),
            count,
            case.dtype.name,
            case.op if blocks.reduces else "none",
            case.in_place,
            case.memory,
            size,
            0,
        )
        if case.check:
            result.wrong = _wrong(comm, case, plan, own if case.in_place else send, recv)
        own[...] = 1  # timing in place must neither overflow nor become subnormal
        if not case.in_place:
            send[...] = 1
        result.iters = case.iters or _iterations(comm, plan, case.warmup)
        results.append(result)
    for _ in range(case.repeats):
        for result in results:
            seconds = _timed(comm, plans[result.algorithm], result.iters)
            own[...] = 1
            result.times_us.append(1e6 * _over_ranks(comm, seconds, case.average))
    for plan in plans.values():
        plan.Free()
    return results


def _plan(comm: Communicator, case: Case, algorithm: str, send: Any, recv: Any) -> AnyPlan:
    datatype = MPI._typedict.get(case.dtype.char)
    # The full specification spares mpi4py the look-up of the type at every native call.
    makers: dict[str, Callable[..., AnyPlan]] = {
        "allreduce": comm.Allreduce_init,
        "reduce_scatter": comm.Reduce_scatter_block_init,
        "allgather": comm.Allgather_init,
        "alltoall": comm.Alltoall_init,
        "broadcast": lambda _, buf, algorithm: comm.Bcast_init(buf, algorithm=algorithm),
    }
    blocks = contract(case.collective)

    def spec(items: Any, parts: int) -> Any:
        return [items, items.size // parts, datatype] if datatype else items

    arguments = [
        MPI.IN_PLACE if send is None else spec(send, blocks.send_blocks(comm.size)),
        spec(recv, blocks.recv_blocks(comm.size)),
    ]
    if blocks.reduces:
        arguments.append(getattr(MPI, case.op.upper()))
    return makers[case.collective](*arguments, algorithm=algorithm)


def _wrong(comm: Communicator, case: Case, plan: AnyPlan, source: Any, recv: Any) -> int:
    """Elements that differ from the prediction, or between ranks, over all ranks."""
    key = (case.collective, case.op, case.dtype)
    inputs.garbage(recv)
    if case.collective != "broadcast" or comm.rank == 0:
        source[...] = inputs.crafted(*key, comm.rank, comm.size, source.size)
    wanted = inputs.expected(*key, comm.rank, comm.size, source.size)
    plan()
    wrong = int(np.count_nonzero(recv.view(np.uint8) != wanted.view(np.uint8)))
    if case.collective == "allreduce" and case.dtype.kind in "fc":
        source[...] = inputs.rounding(case.dtype, comm.rank, source.size)
        plan()
        digests = comm.allgather(hashlib.blake2b(recv.tobytes()).digest())
        # MPI does not promise this of its own collectives, so it is no error of theirs.
        if plan.algorithm != "native" and digests[comm.rank] != digests[0]:
            wrong += recv.size
    return comm.allreduce(wrong)


def _iterations(comm: Communicator, plan: AnyPlan, warmup: int) -> int:
    """As many calls as fit the budget; the same on all ranks."""
    _timed(comm, plan, max(1, warmup))
    seconds = comm.allreduce(_timed(comm, plan, 3), op=MPI.MAX)
    return int(min(MOST_ITERS, max(1, BUDGET_S / max(seconds, 1e-9))))


def _timed(comm: Communicator, plan: AnyPlan, iters: int) -> float:
    """Seconds a call."""
    comm.Barrier()
    begun = perf_counter()
    for _ in range(iters):
        plan()
    return (perf_counter() - begun) / iters


def _over_ranks(comm: Communicator, seconds: float, average: int) -> float:
    times = comm.allgather(seconds)
    return [times[0], sum(times) / len(times), min(times), max(times)][average]
