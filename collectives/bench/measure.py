"""Times bound plans beside the MPI library's collective, and checks what they compute."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from time import perf_counter
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.bench import inputs
from collectives.bench.device import ByTheHost, Row
from collectives.bench.overlap import overlap
from collectives.calls.arguments import Arguments
from collectives.calls.call import named
from collectives.calls.mpi4py_spec import TYPES
from collectives.communicator import Communicator
from collectives.contracts import CONTRACTS, Contract, Member, contract
from collectives.execution.transport.cuda_memory import CudaMemory
from collectives.execution.transport.shared_memory import SLOTS

#: Seconds of one repeat of one algorithm, without ``--iters``.
BUDGET_S = 0.02
MOST_ITERS = 2000
#: Collectives whose least memory traffic is known.
FLOORS = ("allreduce", "allgather", "alltoall")
#: Most sets of buffers in turn.
MOST_SETS = 64
#: Bytes of the smallest buffers that are rewritten: at smaller ones, to meet before each call would
#: be what is measured.
REWRITTEN_BYTES = 16 << 10


@dataclass(frozen=True)
class Case:
    """A measurement: one collective on one size, by several algorithms.

    Attributes:
        nbytes: size of the larger buffer, rounded down to whole items and blocks.
        vector: whether its v-variant is called, with equal blocks.
        memory: ``"numpy"``, ``"shared"`` for arrays of ``Communicator.empty``; on a GPU ``"cupy"``,
            or ``"ipc"`` for arrays of ``Communicator.empty`` there.
        rewritten: whether a rank writes to its buffers before each call, as a program does.
        rotating: bytes of the sets of buffers, at most 64 and for 510 plans in all, which
            take turns so that large ones do not stay in the caches.
        tests: number of calls of ``Test`` in the measured overlap with computation.
        floor: whether to measure the time of the least memory traffic.
        average: combination of the ranks' times: 0 rank 0, 1 mean, 2 least, 3 largest.
    """

    collective: str
    nbytes: int
    dtype: np.dtype[Any]
    op: str
    algorithms: list[str]
    repeats: int
    memory: str = "numpy"
    in_place: bool = False
    iters: int | None = None
    warmup: int = 1
    check: bool = False
    average: int = 3
    rewritten: bool = True
    rotating: int = 0
    floor: bool = False
    tests: int | None = None
    vector: bool = False

    @property
    def on_device(self) -> bool:
        """Whether the buffers lie on a GPU."""
        return self.memory in ("cupy", "ipc")

    def count(self, size: int) -> int:
        """Items of a block."""
        return self.nbytes // self.dtype.itemsize // contract(self.collective).blocks(size)


@dataclass
class Result:
    """Result of one algorithm at one size; times are microseconds a call, for each repeat.

    ``ranks_us`` are each rank's, means over the repeats; empty for messages between pairs.
    """

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
    sets: int = 1
    floor_us: float | None = None
    overlap: float | None = None
    streams: int = 1
    times_us: list[float] = field(default_factory=list)
    ranks_us: list[float] = field(default_factory=list)
    wrong: int | None = None

    @property
    def time_us(self) -> float:
        """Median over the repeats."""
        return float(np.median(self.times_us))

    @property
    def spread(self) -> float | None:
        """Largest distance of a quartile from the median, relative to it; None below 3 repeats."""
        if len(self.times_us) < 3:
            return None
        low, middle, high = np.percentile(self.times_us, [25, 50, 75]).tolist()
        return float(max(high - middle, middle - low) / middle) if middle else 0.0

    @property
    def algbw(self) -> float:
        """Bytes over time in GB/s, of all simultaneous messages."""
        return self.streams * self.bytes / self.time_us / 1e3

    @property
    def contract(self) -> Contract | None:
        """Contract of the collective; ``None`` for messages between pairs."""
        return CONTRACTS.get(self.collective.removesuffix("v"))

    @property
    def busbw(self) -> float:
        """Bandwidth in GB/s of an ideal algorithm's busiest link; comparable across ranks."""
        return self.algbw * (self.contract.traffic(self.ranks) if self.contract else 1.0)


def allocator(comm: Communicator, memory: str) -> Callable[..., Any]:
    """Allocator of zeros in a kind of memory, as :class:`Case` names it."""
    if memory == "shared":
        return comm.empty
    if memory == "ipc":
        return partial(comm.empty, memory="cupy")
    if memory == "cupy":
        import cupy

        zeros: Callable[..., Any] = cupy.zeros
        return zeros
    return np.zeros


class Buffers:
    """One set of buffers of this rank."""

    def __init__(self, comm: Communicator, case: Case) -> None:
        blocks = contract(case.collective)
        member = Member(comm.rank, comm.size)
        count = case.count(comm.size)
        allocate = allocator(comm, case.memory)
        place = blocks.place(member) if case.in_place and blocks.in_place else None
        sent = count * blocks.send_blocks(member)
        # Allocating shared memory is collective, so all ranks do it, in place or not.
        self.recv = allocate(count * blocks.recv_blocks(member), case.dtype)
        own = allocate(sent if place is None else 0, case.dtype)
        self.send = own if place is None else None
        self.source = own if place is None else self.recv[place * count :][:sent]
        datatype = TYPES.get(case.dtype.char)

        def spec(items: Any, parts: int) -> Any:
            # The full specification spares mpi4py the look-up of the type at every native call.
            if not parts:
                return None
            counts = [count] * parts if case.vector and parts > 1 else count
            return [items, counts, datatype] if datatype else items

        self.arguments = Arguments(
            case.collective,
            MPI.IN_PLACE if self.send is None else spec(self.send, blocks.send_blocks(member)),
            spec(self.recv, blocks.recv_blocks(member)),
            named(case.op) if blocks.reduces else None,
            vector=case.vector,
        )

    def quiet(self) -> None:
        """Fills with ones, so that sums in place neither overflow nor become subnormal."""
        self.recv[...] = 1
        self.source[...] = 1


def measure(comm: Communicator, case: Case) -> list[Result]:
    """Results in the order of ``case.algorithms``.  Collective.

    The algorithms take turns within each repeat, in every second one backwards, so that drifts of
    the machine and contents of the caches affect all alike.  Algorithms that cannot run this type
    (native float16 on some MPIs) are left out.
    """
    blocks = contract(case.collective)
    if case.collective == "broadcast":  # MPI has no other
        case = replace(case, in_place=True)
    if case.collective == "barrier":  # as Communicator.Barrier: of a byte that nobody looks at
        case = replace(case, nbytes=1, dtype=np.dtype(np.uint8), op="max")
    if blocks.in_place is None and case.in_place:
        return []
    size = comm.size
    nbytes = case.count(size) * blocks.blocks(size) * case.dtype.itemsize
    most = min(MOST_SETS, (SLOTS - 2) // len(case.algorithms))  # plans that the node has slots for
    sets = max(1, min(most, -(-case.rotating // max(nbytes, 1))))
    buffers = [Buffers(comm, case) for _ in range(sets)]
    plans = {
        algorithm: [_plan(comm, case, b.arguments, algorithm) for b in buffers]
        for algorithm in case.algorithms
        if algorithm != "native" or TYPES.get(case.dtype.char)
    }
    results = []
    called = f"{case.collective}v" if case.vector else case.collective
    op = "none" if not blocks.reduces or blocks.idempotent else case.op
    for algorithm, rotated in plans.items():
        result = Result(
            called, algorithm, rotated[0].algorithm, rotated[0].reason, nbytes,
            case.count(size), case.dtype.name, op,
            case.in_place, case.memory, size, 0, sets, ranks_us=[0.0] * size,
        )  # fmt: skip
        if case.check and case.collective != "barrier":
            result.wrong = _wrong(comm, case, rotated[0], buffers[0])
        for each in buffers:
            each.quiet()
        result.iters = case.iters or _iterations(comm, case, rotated)
        results.append(result)
    rewritten = buffers if case.rewritten and nbytes >= REWRITTEN_BYTES else []
    if case.floor:
        floor_us = 1e6 * stream(comm, case, nbytes)
        for result in results:
            result.floor_us = floor_us
    for repeat in range(case.repeats):
        for result in results[:: -1 if repeat % 2 else 1]:
            _timed(comm, case, plans[result.algorithm], case.warmup)
            seconds = _timed(comm, case, plans[result.algorithm], result.iters, rewritten)
            for each in buffers:
                each.quiet()
            times = comm.allgather(seconds)
            combined = times[0], sum(times) / len(times), min(times), max(times)
            result.times_us.append(1e6 * combined[case.average])
            for rank, each_s in enumerate(times):
                result.ranks_us[rank] += 1e6 * each_s / case.repeats
    for result in results:
        if case.tests is not None:
            result.overlap = overlap(comm, plans[result.algorithm][0], case.tests)
    for rotated in plans.values():
        for plan in rotated:
            plan.Free()
    return results


def _plan(comm: Communicator, case: Case, arguments: Arguments, algorithm: str) -> Row:
    if case.on_device and algorithm == "native":
        return ByTheHost(comm, arguments)
    return comm.plan(arguments, algorithm)


def stream(comm: Communicator, case: Case, nbytes: int) -> float:
    """Seconds of all ranks together for the least loads and stores.

    With p ranks and s bytes in the larger buffer of each, an all-reduce moves 2 p s bytes, as every
    byte is loaded and one is stored; an all-to-all the same; an all-gather p s + s, as a block is
    loaded once and stored p times.  Each rank moves its share in arrays of its own, in the same
    kind of memory, like STREAM's add for reductions and its copy for others.  Loads of lines before
    stores are not counted.
    """
    loaded = nbytes // comm.size if case.collective == "allgather" else nbytes
    allocate = allocator(comm, case.memory)
    reduces = case.collective == "allreduce"
    move: Callable[..., Any] = (
        np.add if reduces else lambda source, target: np.copyto(target, source)
    )
    arrays = 3 if reduces else 2
    count = max(1, (loaded + nbytes) // arrays // case.dtype.itemsize)
    operands = [allocate(count, case.dtype) for _ in range(arrays)]
    for each in operands:
        each[...] = 1
    turns = min(MOST_ITERS, max(1, int(BUDGET_S * 2e9 / max(nbytes, 1))))
    times = []
    for _ in range(case.repeats):
        comm.Barrier(algorithm="native")
        begun = perf_counter()
        for _ in range(turns):
            move(*operands)
        times.append(comm.allreduce((perf_counter() - begun) / turns, MPI.MAX))
    return float(np.median(times))


def _wrong(comm: Communicator, case: Case, plan: Row, buffers: Buffers) -> int:
    """Number of elements on all ranks that differ from the prediction or between ranks."""
    key = (case.collective, case.op, case.dtype)
    count = case.count(comm.size)
    source, recv = buffers.source, buffers.recv
    inputs.garbage(recv)
    if source.size:
        inputs.put(source, inputs.crafted(*key, comm.rank, comm.size, source.size))
    wanted = inputs.expected(*key, comm.rank, comm.size, count)
    plan()
    got = inputs.on_host(recv)
    wrong = 0
    if wanted is not None and got.size:
        differs = got.view(np.uint8) != wanted.view(np.uint8)
        wrong = int(differs.reshape(got.size, -1).any(axis=1).sum())
    if case.collective == "allreduce" and case.dtype.kind in "fc":
        inputs.put(source, inputs.rounding(case.dtype, comm.rank, source.size))
        plan()
        digests = comm.allgather(hashlib.blake2b(inputs.on_host(recv).tobytes()).digest())
        # MPI does not promise this of its own collectives, so it is no error of theirs.
        if plan.algorithm != "native" and digests[comm.rank] != digests[0]:
            wrong += recv.size
    return comm.allreduce(wrong)


def _iterations(comm: Communicator, case: Case, plans: list[Row]) -> int:
    """Number of calls within the budget; the same on all ranks."""
    _timed(comm, case, plans, 1)
    seconds = comm.allreduce(_timed(comm, case, plans, 3), op=MPI.MAX)
    return int(min(MOST_ITERS, max(1, BUDGET_S / max(seconds, 1e-9))))


def _timed(
    comm: Communicator, case: Case, plans: list[Row], iters: int, buffers: Sequence[Buffers] = ()
) -> float:
    """Seconds a call, with plans in turn; on a device, until all queued work is done.

    Args:
        buffers: the plans' buffers, if they are rewritten before each call.
    """
    if buffers:
        seconds = 0.0
        for plan, own in islice(cycle(zip(plans, buffers)), iters):
            own.quiet()
            seconds += _timed(comm, case, [plan], 1)
        return seconds / max(iters, 1)
    turns = list(islice(cycle(plans), iters))
    device = CudaMemory() if case.on_device else None
    if device:
        device.settle()
    comm.Barrier(algorithm="native")
    begun = perf_counter()
    for plan in turns:
        plan()
    if device:
        device.settle()
    return (perf_counter() - begun) / max(iters, 1)
