"""A drop-in for mpi4py's communicator whose collectives are ours."""

import logging
import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from collectives.algorithms import build
from collectives.call import Call, read_call
from collectives.errors import CollectiveError, MismatchError
from collectives.executor import TAGS_PER_PLAN, bind
from collectives.native import NativePlan
from collectives.plan import Plan
from collectives.reduction import combiner
from collectives.shared_executor import Places, bind_shared, runs_shared, shared_places
from collectives.transport.mpi import MPITransport
from collectives.transport.shared_memory import SLOTS, NodeMemory

log = logging.getLogger("collectives")

#: Plans of blocking calls are kept for the next call with the same memory: as many, up to this
#: size each.  Above it, binding is cheap beside the transfer.
CACHED_PLANS = 32
CACHED_BYTES = 4 << 20
#: Room for a call in words, when ranks compare them.
_CALL_BYTES = 256

AnyPlan = Plan | NativePlan


class Communicator(MPI.Intracomm):
    """``MPI.Intracomm`` with ``algorithm=`` on its collectives; the rest is mpi4py's.

    >>> comm = Communicator(MPI.COMM_WORLD)
    >>> comm.Allreduce(sendbuf, recvbuf, op=MPI.SUM, algorithm="ring")   # doctest: +SKIP

    Buffers are given as to mpi4py: ``array``, ``[array, MPI.FLOAT]``, ``[array, count,
    MPI.FLOAT]``, ``MPI.IN_PLACE``.  ``algorithm`` is a name of ``python -m collectives list``, with
    options (``"parameter_server:servers=2"``), ``"native"`` for the MPI library's own, or
    ``"auto"``.  An all-reduce is bitwise equal on all ranks, whatever the algorithm.

    Args:
        comm: the communicator to work on.  It is duplicated at the first collective, so that our
            messages and the caller's cannot meet.
        algorithm: what calls use that name none.
        check: compare every call across ranks first, so that calls that do not belong together
            raise :class:`MismatchError` on all ranks instead of hanging; one small exchange a
            call.  Default: whether ``COLLECTIVES_CHECK`` is set to other than ``0``.
    """

    def __new__(
        cls, comm: MPI.Intracomm | None = None, algorithm: str = "auto", check: bool | None = None
    ) -> Self:
        return super().__new__(cls, comm)

    def __init__(
        self, comm: MPI.Intracomm | None = None, algorithm: str = "auto", check: bool | None = None
    ) -> None:
        self._algorithm = algorithm
        self._check = os.environ.get("COLLECTIVES_CHECK", "0") != "0" if check is None else check
        self._transport: MPITransport | None = None
        self._node: NodeMemory | None = None
        self._one_node: bool | None = None
        self._plans_made = 0
        self._active: list[Plan] = []
        self._cache: OrderedDict[tuple[object, Places | None], Plan] = OrderedDict()
        #: The plan of the last call: its ``algorithm`` and the ``reason`` for it.
        self.last_plan: AnyPlan | None = None

    def Allreduce(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, algorithm: str | None = None
    ) -> None:
        """Reduces ``sendbuf`` over all ranks into every rank's ``recvbuf``."""
        self._run("allreduce", sendbuf, recvbuf, op, algorithm)

    def Allgather(self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None) -> None:
        """Gathers every rank's ``sendbuf`` into every rank's ``recvbuf``, in rank order."""
        self._run("allgather", sendbuf, recvbuf, None, algorithm)

    def Alltoall(self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None) -> None:
        """Sends block j of ``sendbuf`` to rank j, and receives its block into place j."""
        self._run("alltoall", sendbuf, recvbuf, None, algorithm)

    def Iallreduce(  # type: ignore[override]
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, algorithm: str | None = None
    ) -> AnyPlan:
        """:meth:`Allreduce` under way; ``Wait`` for it, with calls of ``Test`` in between."""
        return self._make("allreduce", sendbuf, recvbuf, op, algorithm).begin()

    def Iallgather(  # type: ignore[override]
        self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None
    ) -> AnyPlan:
        """:meth:`Allgather` under way."""
        return self._make("allgather", sendbuf, recvbuf, None, algorithm).begin()

    def Ialltoall(  # type: ignore[override]
        self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None
    ) -> AnyPlan:
        """:meth:`Alltoall` under way."""
        return self._make("alltoall", sendbuf, recvbuf, None, algorithm).begin()

    def Allreduce_init(  # type: ignore[override]
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: str | None = None,
    ) -> AnyPlan:
        """A plan for :meth:`Allreduce`; it keeps the buffers alive.  Collective, like MPI's."""
        return self._make("allreduce", sendbuf, recvbuf, op, algorithm)

    def Allgather_init(  # type: ignore[override]
        self,
        sendbuf: Any,
        recvbuf: Any,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: str | None = None,
    ) -> AnyPlan:
        """A plan for :meth:`Allgather`."""
        return self._make("allgather", sendbuf, recvbuf, None, algorithm)

    def Alltoall_init(  # type: ignore[override]
        self,
        sendbuf: Any,
        recvbuf: Any,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: str | None = None,
    ) -> AnyPlan:
        """A plan for :meth:`Alltoall`."""
        return self._make("alltoall", sendbuf, recvbuf, None, algorithm)

    def empty(self, shape: Any, dtype: Any = float) -> npt.NDArray[Any]:
        """A new array of zeros on every rank, in memory that the ranks of a node can all address.

        Collectives on such arrays are loads and stores: no message is sent.  Collective; the shape
        may differ between ranks.  The memory goes with the last array in it.  Where the ranks are
        on several nodes, it is ordinary memory.

        Raises:
            InvalidBuffer: on all ranks, if the node does not let them share memory.
        """
        if self._one_node is None:
            node = MPI.Intracomm(self).Split_type(MPI.COMM_TYPE_SHARED)
            self._one_node = node.size == self.size
            node.Free()
        if not self._one_node:
            return np.zeros(shape, dtype)
        if self._node is None:
            self._node = NodeMemory(self._mpi.channel)
        return self._node.empty(shape, dtype)

    def Dup(self, info: MPI.Info | None = None) -> Self:
        return self._like(super().Dup(info))

    def Split(self, color: int = 0, key: int = 0) -> Self:
        return self._like(super().Split(color, key))

    def Split_type(self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> Self:
        return self._like(super().Split_type(split_type, key, info))

    def Free(self) -> None:
        """Frees this handle's communicator, with everything that :meth:`close` releases."""
        self.close()
        super().Free()

    def close(self) -> None:
        """Releases plans and the duplicate; the communicator itself stays usable.  Collective."""
        for plan in self._cache.values():
            plan.Free()
        self._cache.clear()
        self._node = None
        if self._transport is not None:
            self._transport.channel.Free()
            self._transport = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:  # with one rank in trouble, a collective Free would hang
            self.close()

    def _like(self, comm: MPI.Comm) -> Self:
        """``comm`` with this communicator's settings."""
        if comm == MPI.COMM_NULL:
            return comm  # type: ignore[return-value]  # as mpi4py: the rank is in no group
        return type(self)(comm, self._algorithm, self._check)  # type: ignore[arg-type]

    def _progress(self) -> None:
        """Moves the plans that are under way along, lest a rank that waits for them wait for us."""
        for plan in tuple(self._active):
            plan.Test()
        os.sched_yield()

    @property
    def _idle(self) -> Callable[[], None] | None:
        return self._progress if self._active else None

    @property
    def _mpi(self) -> MPITransport:
        if self._transport is None:
            self._transport = MPITransport(MPI.Intracomm(self).Dup())
        return self._transport

    def _run(
        self, collective: str, sendbuf: Any, recvbuf: Any, op: MPI.Op | None, algorithm: str | None
    ) -> None:
        """A blocking call: look its plan up by the memory that it is about, or bind one."""
        algorithm = algorithm or self._algorithm
        if algorithm == "native" and not self._check:
            self._complete(NativePlan(self, collective, sendbuf, recvbuf, op, "asked for"))
            return
        call = self._read(collective, sendbuf, recvbuf, op, algorithm)
        places = None if self._node is None else shared_places(call, self._node, self._idle)
        key = (call.key, places)
        plan: AnyPlan | None = self._cache.pop(key, None)
        if plan is None:
            # Blocking calls follow one another, so they can all use the first tags and counters.
            plan = self._plan(call, places, number=0, borrow=True)
        if isinstance(plan, Plan) and (places or plan.nbytes <= CACHED_BYTES):
            self._cache[key] = plan
        if len(self._cache) > CACHED_PLANS:
            self._cache.popitem(last=False)[1].Free()
        self._complete(plan)

    def _complete(self, plan: AnyPlan) -> None:
        self.last_plan = plan
        if self._idle is None:
            plan()
        else:
            plan.Start()
            while not plan.Test():
                self._progress()

    def _make(
        self, collective: str, sendbuf: Any, recvbuf: Any, op: MPI.Op | None, algorithm: str | None
    ) -> AnyPlan:
        """A persistent call: a plan of its own, with tags and counters of its own."""
        call = self._read(collective, sendbuf, recvbuf, op, algorithm or self._algorithm)
        places = None if self._node is None else shared_places(call, self._node, self._idle)
        self._plans_made += 1
        self.last_plan = self._plan(call, places, self._plans_made, borrow=False)
        return self.last_plan

    def _read(
        self, collective: str, sendbuf: Any, recvbuf: Any, op: MPI.Op | None, algorithm: str
    ) -> Call:
        """Understands a call; with checking on, all ranks raise if one of them has to."""
        refused: CollectiveError | None = None
        try:
            call = read_call(collective, self.size, sendbuf, recvbuf, op, algorithm)
        except CollectiveError as error:
            refused = error
        if self._check:
            self._agree(str(refused or call))
        if refused:
            raise refused
        return call

    def _agree(self, call: str) -> None:
        """Raises :class:`MismatchError` on all ranks unless they all make the same call."""
        mine = np.zeros(_CALL_BYTES, np.uint8)
        encoded = call.encode()[:_CALL_BYTES]
        mine[: len(encoded)] = list(encoded)
        everybody = np.empty((self.size, _CALL_BYTES), np.uint8)
        request = self._mpi.channel.Iallgather(mine, everybody)
        while not request.Test():
            self._progress()
        calls: dict[str, list[str]] = {}
        for rank, told in enumerate(everybody):
            text = told.tobytes().rstrip(b"\0").decode(errors="replace")
            calls.setdefault(text, []).append(str(rank))
        if len(calls) > 1:
            listed = "; ".join(
                f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {text}"
                for text, ranks in calls.items()
            )
            raise MismatchError(f"the ranks' calls do not belong together: {listed}")

    def _plan(self, call: Call, places: Places | None, number: int, borrow: bool) -> AnyPlan:
        """Binds ``call``; plans in flight together need different numbers."""
        algorithm, reason = call.choose(self.size, shared=places is not None)
        log.info("%s: %s (%s)", call, algorithm, reason)
        if algorithm == "native":
            return NativePlan(self, call.collective, *call.arguments, reason)
        schedule = build(call.collective, algorithm, self.size)
        combine = None
        if call.op is not None:
            combine = combiner(call.op, call.recv.items.dtype, call.recv.mpi_datatype())
        recv = call.recv.memory(borrow)
        if self._node is not None and places is not None and runs_shared(schedule, places):
            slot = 1 if number == 0 else 2 + number % (SLOTS - 2)
            return bind_shared(
                schedule,
                self._node,
                slot,
                places,
                recv,
                combine,
                borrow=borrow,
                reason=reason,
                active=self._active,
            )
        slots = (MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767) // TAGS_PER_PLAN
        return bind(
            schedule,
            self._mpi,
            None if call.send is None else call.send.memory(borrow),
            recv,
            combine,
            tag=(0 if number == 0 else 1 + number % (slots - 1)) * TAGS_PER_PLAN,
            reason=reason,
            active=self._active,
        )
