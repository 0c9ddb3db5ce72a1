"""What a communicator does with a call: understand it, agree on it, bind it or find it, run it."""

import logging
import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from collectives.algorithms import build
from collectives.call import Call, read_call
from collectives.errors import CollectiveError, InvalidBuffer, MismatchError
from collectives.executor import TAGS_PER_PLAN, bind
from collectives.native import NativePlan
from collectives.plan import Plan
from collectives.reduction import combiner
from collectives.rooted import rooted
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


class Engine:
    """The state of one communicator: its duplicate, its plans, its memory.

    Attributes:
        last_plan: the plan of the last call.
    """

    def __init__(self, comm: MPI.Intracomm, algorithm: str, check: bool) -> None:
        self.comm = comm
        self.algorithm = algorithm
        self.check = check
        self.last_plan: AnyPlan | None = None
        self._transport: MPITransport | None = None
        self._node: NodeMemory | None = None
        self._one_node: bool | None = None
        self._plans_made = 0
        self._active: list[Plan] = []
        self._cache: OrderedDict[tuple[object, Places | None], Plan] = OrderedDict()

    def empty(self, shape: Any, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Zeros in the node's memory, or in ordinary memory where that cannot be."""
        if self._one_node is None:
            node = MPI.Intracomm(self.comm).Split_type(MPI.COMM_TYPE_SHARED)
            self._one_node = node.size == self.comm.size
            node.Free()
        if not self._one_node:
            return np.zeros(shape, dtype)
        try:
            if self._node is None:
                self._node = NodeMemory(self._mpi.channel)
            return self._node.empty(shape, dtype)
        except InvalidBuffer as error:  # on all ranks
            log.warning("ordinary memory instead of shared: %s", error)
            self._one_node = False
            return np.zeros(shape, dtype)

    def close(self) -> None:
        """Releases plans and the duplicate.  Collective."""
        for plan in self._cache.values():
            plan.Free()
        self._cache.clear()
        self._node = None
        if self._transport is not None:
            self._transport.channel.Free()
            self._transport = None

    def run(
        self,
        collective: str,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op | None,
        algorithm: str | None,
        root: int = 0,
    ) -> None:
        """A blocking call: look its plan up by the memory that it is about, or bind one."""
        algorithm = algorithm or self.algorithm
        if algorithm == "native" and not self.check:
            self._complete(
                NativePlan(self.comm, collective, sendbuf, recvbuf, op, root, "asked for")
            )
            return
        call = self._read(collective, sendbuf, recvbuf, op, algorithm, root)
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

    def make(
        self,
        collective: str,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op | None,
        algorithm: str | None,
        root: int = 0,
    ) -> AnyPlan:
        """A persistent call: a plan of its own, with tags and counters of its own."""
        call = self._read(collective, sendbuf, recvbuf, op, algorithm or self.algorithm, root)
        places = None if self._node is None else shared_places(call, self._node, self._idle)
        self._plans_made += 1
        self.last_plan = self._plan(call, places, self._plans_made, borrow=False)
        return self.last_plan

    def _read(
        self,
        collective: str,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op | None,
        algorithm: str,
        root: int,
    ) -> Call:
        """Understands a call; with checking on, all ranks raise if one of them has to."""
        refused: CollectiveError | None = None
        try:
            call = read_call(collective, self.comm.size, sendbuf, recvbuf, op, algorithm, root)
        except CollectiveError as error:
            refused = error
        if self.check:
            self._agree(str(refused or call))
        if refused:
            raise refused
        return call

    def _agree(self, call: str) -> None:
        """Raises :class:`MismatchError` on all ranks unless they all make the same call."""
        mine = np.zeros(_CALL_BYTES, np.uint8)
        encoded = call.encode()[:_CALL_BYTES]
        mine[: len(encoded)] = list(encoded)
        everybody = np.empty((self.comm.size, _CALL_BYTES), np.uint8)
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
        algorithm, reason = call.choose(self.comm.size, shared=places is not None)
        log.info("%s: %s (%s)", call, algorithm, reason)
        if algorithm == "native":
            return NativePlan(self.comm, call.collective, *call.arguments, call.root, reason)
        schedule = rooted(build(call.collective, algorithm, self.comm.size), call.root)
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
            self._transport = MPITransport(MPI.Intracomm(self.comm).Dup())
        return self._transport
