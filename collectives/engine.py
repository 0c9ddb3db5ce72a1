"""What a communicator does with a call: understand it, agree on it, bind it or find it, run it."""

import logging
import os
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from collectives.agreement import Agreement
from collectives.algorithms import names, parse
from collectives.binding import bind_call
from collectives.call import Arguments, Call, read_call
from collectives.errors import CollectiveError
from collectives.library import library
from collectives.native import NativePlan
from collectives.plan import Plan
from collectives.recent import Recent
from collectives.resources import Resources
from collectives.shared_executor import Places, shared_places, words
from collectives.transport.mpi import MPITransport
from collectives.transport.shared_memory import Meeting
from collectives.watchdog import Watchdog, Watched

log = logging.getLogger("collectives")

#: Plans of blocking calls are kept for the next call with the same memory: as many, up to this
#: size each.  Above it, binding is cheap beside the transfer.
CACHED_PLANS = 32
CACHED_BYTES = 4 << 20

AnyPlan = Plan | NativePlan | Watched


class Small(NamedTuple):
    """In the place of a plan, for calls that went straight to the MPI library."""

    algorithm: str
    reason: str


_LEFT_TO_NATIVE = Small("native", "small: fastest, as measured")


class _Limits(dict[str, int]):
    """For each collective, the bytes below which a call without ``algorithm`` is native."""

    def __init__(self, engine: "Engine") -> None:
        self.engine = engine

    def __missing__(self, collective: str) -> int:
        engine = self.engine
        auto = engine.algorithm == "auto" and not engine.check and engine.watchdog is None
        auto = auto and not engine.resources.kind.sealed
        self[collective] = engine.native_below(collective) if auto else 0
        return self[collective]


class Engine:
    """The state of one communicator: its duplicate, its plans, its memory.

    Attributes:
        last_plan: the plan of the last call.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        algorithm: str,
        check: bool,
        tuning: str | Path | None,
        timeout: float | None,
        device: str,
        transport: type[MPITransport],
    ) -> None:
        self.comm = comm
        self.algorithm = algorithm
        self.check = check
        self.timeout = timeout
        self.resources = Resources(comm, tuning, device, transport)
        self.watchdog = Watchdog(MPI.Intracomm(comm), timeout) if timeout else None
        self.last_plan: AnyPlan | Small | None = None
        self._plans_made = 0
        self._agreement = Agreement(self._progress)
        self._active: list[Plan] = []
        self._recent = Recent()
        self._small = _Limits(self)
        self._cache: OrderedDict[tuple[object, Places | None], Plan] = OrderedDict()

    def empty(self, shape: Any, dtype: npt.DTypeLike, memory: str) -> npt.NDArray[Any]:
        """Zeros in the node's memory, or in ordinary memory where that cannot be."""
        if self.watchdog is None:
            return self._empty(shape, dtype, memory)
        call = self.watchdog.enter(Arguments("empty", None, None), None)
        try:
            return self._empty(shape, dtype, memory)
        finally:
            self.watchdog.leave(call)

    def _empty(self, shape: Any, dtype: npt.DTypeLike, memory: str) -> npt.NDArray[Any]:
        before = self.resources.node
        items = self.resources.empty(shape, dtype, memory)
        if self.resources.node is not before:
            self._recent.clear()  # from now on the ranks meet
        return items

    def close(self) -> None:
        """Releases plans and the duplicate.  Collective."""
        if self.watchdog is not None:
            self.watchdog.close()
            self.watchdog = None
        for plan in self._cache.values():
            plan.Free()
        self._cache.clear()
        self._recent.clear()
        self.resources.close()

    def revoke(self) -> None:
        """Lets go of everything without asking the other ranks, some of which may be dead."""
        if self.watchdog is not None:
            self.watchdog.close()
            self.watchdog = None
        self._cache.clear()
        self._recent.clear()
        self._active.clear()
        self.resources.revoke()

    def run(self, arguments: Arguments, algorithm: str | None = None) -> None:
        """A blocking call."""
        if self.watchdog is None:
            self._run(arguments, algorithm)
            return
        call = self.watchdog.enter(arguments, algorithm or self.algorithm)
        try:
            self._run(arguments, algorithm)
        finally:
            self.watchdog.leave(call)

    def _run(self, arguments: Arguments, algorithm: str | None) -> None:
        """Looks the plan up by the memory that it is about, or binds one."""
        meeting = None
        if not self.check:
            recent = self._recent.find(arguments, algorithm)
            if recent is not None:
                if recent.meeting is not None:
                    mine = recent.meeting[self.comm.rank]
                    meeting = self._meet(struct.unpack("4q", mine))
                if meeting == recent.meeting:  # nobody came with other arrays
                    self._complete(recent.plan or NativePlan(self.comm, arguments, "as before"))
                    return
        wanted, algorithm = algorithm, algorithm or self._default(arguments.collective)
        if algorithm == "native" and not self.check:
            self._complete(NativePlan(self.comm, arguments, "asked for"))
            return
        call = self._read(arguments, algorithm)
        node, places = self.resources.node, None
        if node is not None and (meeting is not None or self._meets(call)):
            if meeting is None:
                meeting = self._meet(words(call, node))
            places = shared_places(meeting, node)
        key = (call.key, places)
        plan: Plan | NativePlan | None = self._cache.pop(key, None)
        if plan is None:
            # Blocking calls follow one another, so they can all use the first tags and counters.
            plan = self._plan(call, places, number=0, borrow=True)
        if isinstance(plan, Plan) and (places or plan.nbytes <= CACHED_BYTES):
            self._cache[key] = plan
        if len(self._cache) > CACHED_PLANS:
            self._cache.popitem(last=False)[1].Free()
        if isinstance(plan, NativePlan) or not plan.is_freed:
            kept = None if isinstance(plan, NativePlan) else plan
            self._recent.remember(arguments, wanted, kept, meeting)
        self._complete(plan)

    def _complete(self, plan: AnyPlan) -> None:
        self.last_plan = plan
        if isinstance(plan, NativePlan):
            # MPI's blocking collectives match none of its nonblocking ones, and no rank knows who
            # else has plans under way: whoever has, ends them first.  All ranks have started them.
            while self._active:
                self._progress()
        if self._idle is None:
            plan()
        else:
            plan.Start()
            while not plan.Test():
                self._progress()

    def make(self, arguments: Arguments, algorithm: str | None = None) -> AnyPlan:
        """A persistent call."""
        if self.watchdog is None:
            return self._make(arguments, algorithm)
        call = self.watchdog.enter(arguments, algorithm or self.algorithm)
        try:
            plan = self._make(arguments, algorithm)
        finally:
            self.watchdog.leave(call)
        return Watched(plan, arguments, self.watchdog)

    def _make(self, arguments: Arguments, algorithm: str | None) -> Plan | NativePlan:
        """A plan of its own, with tags and counters of its own."""
        call = self._read(arguments, algorithm or self._default(arguments.collective))
        places = None
        node = self.resources.node
        if node is not None and self._meets(call):
            places = shared_places(self._meet(words(call, node)), node)
        self._plans_made += 1
        plan = self._plan(call, places, self._plans_made, borrow=False)
        self.last_plan = plan
        return plan

    def leaves_to_native(self, collective: str, items: Any) -> bool:
        """Whether ``auto`` is native for an array of this size, before anything else is looked at.

        Anything else costs more than a small native collective takes.
        """
        if type(items) is not np.ndarray or items.nbytes >= self._small[collective]:
            return False
        if self._active or items.dtype.char not in MPI._typedict:
            return False
        self.last_plan = _LEFT_TO_NATIVE
        return True

    def native_below(self, collective: str) -> int:
        """The bytes up to which ``auto`` is native."""
        ranks = self.comm.size, self.resources.ranks_per_node
        return self.resources.table.native_below(library(), collective, *ranks)

    def _meets(self, call: Call) -> bool:
        """Whether the ranks tell one another where their buffers lie: the same on all of them."""
        if self.resources.node is None or call.counts is not None:
            return False
        if call.algorithm != "auto" or call.is_on_device:
            return True
        return call.nbytes >= self.native_below(call.collective)

    def _meet(self, mine: Sequence[int]) -> Meeting:
        assert self.resources.node is not None, "ranks meet in its memory"
        return self.resources.node.meet(mine, self._idle)

    def _default(self, collective: str) -> str:
        """The communicator's algorithm, where this collective has it."""
        name, _ = parse(self.algorithm)
        known = name in ("auto", "native", *names(collective))
        default = self.algorithm if known else "auto"
        return "native" if collective == "barrier" and default == "auto" else default

    def _read(self, arguments: Arguments, algorithm: str) -> Call:
        """Understands a call; with checking on, all ranks raise if one of them has to."""
        refused: CollectiveError | None = None
        try:
            call = read_call(arguments, algorithm, self.comm.rank, self.comm.size)
        except CollectiveError as error:
            refused = error
        if self.check:
            self._agreement.check(self.resources.channel, str(refused or call))
        if refused:
            raise refused
        return call

    def _plan(
        self, call: Call, places: Places | None, number: int, borrow: bool
    ) -> Plan | NativePlan:
        return bind_call(call, self.resources, places, number, borrow, self._active)

    @property
    def channel(self) -> MPI.Intracomm:
        """The duplicate.  No plan uses the last tag, ``MPI.TAG_UB``.  Collective at first use."""
        return self.resources.channel

    def complete(self, *requests: MPI.Request) -> None:
        """Waits for ``requests`` while the plans that are under way move along."""
        while not MPI.Request.Testall(requests):
            self._progress()

    def _progress(self) -> None:
        """Moves the plans that are under way along, lest a rank that waits for them wait for us."""
        for plan in tuple(self._active):
            plan.Test()
        os.sched_yield()

    @property
    def _idle(self) -> Callable[[], None] | None:
        return self._progress if self._active else None
