"""Carries out the calls of a communicator: looks up a plan or binds one, and runs it."""

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI
from numpy import ndarray

from collectives.algorithms import Algorithm
from collectives.calls.arguments import Arguments
from collectives.calls.autotune import Autotune
from collectives.calls.bind import Binder
from collectives.calls.call import Call
from collectives.calls.fast_path import Limits, nbytes_of
from collectives.calls.native import call_native, waits_for_device
from collectives.calls.native_plan import Native, NativePlan, NativeRequest
from collectives.calls.plan_cache import CachedCall, Key, PlanCache
from collectives.calls.rendezvous import Location, Rendezvous, all_have
from collectives.calls.resources import Resources
from collectives.calls.settings import Settings
from collectives.calls.validate import Validator
from collectives.errors import CollectiveError
from collectives.execution.plan import Plan
from collectives.execution.progress import Progress
from collectives.execution.shared import Places
from collectives.execution.tags import Tags
from collectives.execution.traffic import Traffic
from collectives.execution.transport.shared_memory import Meeting
from collectives.failure import Watchdog, Watched

AnyPlan = Plan | NativePlan | Watched
#: A nonblocking call under way.
Begun = Plan | NativeRequest | Watched


_LEFT_TO_NATIVE = Native(
    "nothing of ours was measured to be faster here; collectives tune, with mpirun, measures"
)


class Engine:
    """The state of one communicator: its duplicate, its plans, its memory.

    Attributes:
        settings: the communicator's.
        last_plan: the plan of the last call.
        progress: its plans that are under way.
    """

    def __init__(self, comm: MPI.Intracomm, settings: Settings) -> None:
        self.comm = comm
        self.settings = settings
        self.progress = Progress()
        self.resources = Resources(comm, settings, self.complete, self.progress.drain)
        timeout = settings.timeout
        self.watchdog = Watchdog(MPI.Intracomm(comm), timeout) if timeout else None
        #: Sees the blocks that wait for other ranks; the watchdog sees all calls.
        self._onlooker = self.watchdog
        # Settings that native calls have to do with, too.
        delays = settings.transport.delays
        self._reads_all = bool(settings.check or settings.reproducible or delays)
        self.last_plan: AnyPlan | Native | None = None
        self._native_below = Limits(self.resources, self.progress)
        self._unequal_native_below = Limits(self.resources, self.progress, unequal=True)
        self._validator = Validator(comm, self.resources, self.progress)
        self._cache = PlanCache()
        self._rendezvous = Rendezvous(self.resources, self.progress, self._native_below.of_auto)
        self._binder = Binder(self.resources, self.progress)
        self._autotune = Autotune(self.resources, self.progress, self._binder, self._bound)

    def empty(self, shape: Any, dtype: npt.DTypeLike, memory: str) -> npt.NDArray[Any]:
        """Zeros in the node's memory, or in ordinary memory where that cannot be."""
        with self._changing_memory("empty"):
            return self.resources.empty(shape, dtype, memory)

    def count(self, traffic: Traffic | None) -> None:
        """Adds what is sent from now on to ``traffic``, but for plans that are made already."""
        self.progress.traffic = traffic
        self._forget()
        self._cache.free()

    def share(self, array: Any) -> None:
        """Moves an array into the node's memory, where that can be."""
        with self._changing_memory("share"):
            self.resources.share(array)

    @contextmanager
    def _changing_memory(self, what: str) -> Iterator[None]:
        """All ranks are in ``what``, and no plan is under way."""
        with self._watched(Arguments(what, None, None), None):
            self.progress.expect_whole()
            try:
                self.progress.drain()
                self._validator.agree(what)
                # From now on, the ranks meet, and memory may lie where other memory lay before.
                self._forget()
                yield
            except (CollectiveError, MemoryError):  # on all ranks
                raise
            except BaseException as error:
                self.progress.leave(what, error)
                raise

    def close(self) -> None:
        """Releases plans and the duplicate.  Collective."""
        with self.after_plans("close"):
            if self.progress.left:  # the others have ended
                self.progress.forget()
            self._cache.free()
            self._forget()
            self.resources.close()
        self._close_watchdog()

    def revoke(self) -> None:
        """Lets go of everything without asking the other ranks, some of which may be dead."""
        self._close_watchdog()
        self._cache.forget()
        self._forget()
        self.progress.forget()
        self.resources.revoke()

    def watch(self) -> None:
        """Starts a watchdog without a limit, unless settings name one.  It sees no calls of
        arrays, as ranks leave different numbers of them to the MPI library."""
        if self.settings.timeout is None and self._onlooker is None and self.comm.size > 1:
            self._onlooker = Watchdog(MPI.Intracomm(self.comm))
            weakref.finalize(self, self._onlooker.drop).atexit = False

    def _close_watchdog(self) -> None:
        if self._onlooker is not None:
            self._onlooker.close()
            self._onlooker = self.watchdog = None

    def waiting(self, what: str, by_all: bool = True) -> AbstractContextManager[None]:
        """A block that waits for other ranks; ``by_all`` if all of them do it, in one order."""
        onlooker = self._onlooker
        return onlooker.waiting(what, numbered=by_all) if onlooker else nullcontext()

    def after_plans(self, what: str) -> AbstractContextManager[None]:
        """A block that all ranks enter, once the plans of this communicator have ended, which all
        of them have started."""
        if self._onlooker is None:  # in a tenth of the time
            self.progress.drain()
            return nullcontext()
        return self._after_plans(what)

    @contextmanager
    def _after_plans(self, what: str) -> Iterator[None]:
        with self.waiting(what):
            self.progress.drain()
            yield

    @contextmanager
    def _watched(self, arguments: Arguments, algorithm: Algorithm | str | None) -> Iterator[None]:
        """The watchdog, if there is one, watches what is done in it."""
        watchdog = self.watchdog
        if watchdog is None:
            yield
            return
        call = watchdog.enter(arguments, str(algorithm) if algorithm else None)
        try:
            yield
        finally:
            watchdog.leave(call)

    def run(self, arguments: Arguments, algorithm: Algorithm | str | None = None) -> None:
        """Makes a blocking call."""
        if self.watchdog is None:
            self._run(arguments, algorithm)
            return
        with self._watched(arguments, algorithm or self.settings.algorithm):
            self._run(arguments, algorithm)

    def _run(self, arguments: Arguments, algorithm: Algorithm | str | None) -> None:
        """Looks the call up as the caller made it, and runs its plan; parses it otherwise."""
        asked = self.settings.algorithm if algorithm is None else algorithm
        if asked == "native" and not self._reads_all:
            self._complete(None, self._validator.for_native(arguments), "asked for")
            return
        key = None if self.settings.check else self._cache.key(arguments, algorithm)
        meeting = None
        if key is not None and (entry := self._cache.find(key)) is not None:
            if entry.location is not None:
                meeting = self._rendezvous.meet_again(entry.location)
            if meeting == entry.meeting:  # nobody came with other memory, or they need not meet
                self._complete(entry.plan, arguments, "as before")
                return
        self._run_parsed(arguments, algorithm, key, meeting)

    def _run_parsed(
        self,
        arguments: Arguments,
        algorithm: Algorithm | str | None,
        key: Key | None,
        meeting: Meeting | None,
    ) -> None:
        """Looks the parsed call up or binds it, and runs its plan.

        Args:
            meeting: the ranks have met for this call already.
        """
        if algorithm is None:
            # Ranks with plain arrays have asked for it before they came here; others do so now.
            self._native_below[arguments.collective]
            algorithm = self._validator.default(arguments.collective)
        if algorithm == "native" and not self._reads_all:
            self._complete(None, arguments, "asked for")
            return
        call = self._validator.call(arguments, algorithm, "")
        location, places = self._rendezvous.location(call), None
        if location is not None:
            meeting = meeting or self._rendezvous.meet(location)
            places = self._rendezvous.places(meeting)
        call = self._tuned(call, places, measures=True)
        plan, reason = self._cache.take(call, places), "as before"
        if plan is None:
            made = self._binder.bind(call, places, planned=False)
            plan, reason = (None if isinstance(made, NativePlan) else made), made.reason
        kept = plan is None or self._cache.keep(call, places, plan)
        # A call that is found again is not parsed again, and native takes the caller's own words.
        if key is not None and kept and (plan is not None or call.has_buffers_of(arguments)):
            self._cache.remember(key, CachedCall(arguments.op, plan, location, meeting))
        self._complete(plan, call.arguments, reason)
        if plan is not None and not kept:
            plan.Free()

    def _tuned(self, call: Call, places: Places | None, measures: bool) -> Call:
        """The call by the algorithm that autotune has found, if that is on."""
        if not self.settings.autotune:
            return call
        choice = self._autotune.choice(call, places, measures)
        return call if choice is None else replace(call, algorithm=choice[0], why=choice[1])

    def _complete(self, plan: Plan | None, arguments: Arguments, reason: str) -> None:
        """Runs a plan, or the MPI library's own collective in its place."""
        if plan is not None:
            self.last_plan = plan
            try:
                plan()
            except BaseException:
                self.progress.keep(arguments)
                raise
            return
        # MPI's blocking collectives match none of its nonblocking ones, and no rank knows who else
        # has plans under way: whoever has, ends them first.  All ranks have started them.
        self.progress.drain()
        if self.progress.traffic is not None:
            self.progress.traffic.leave()
        sent = arguments.sendbuf
        if type(arguments.recvbuf) is not np.ndarray or not (
            sent is MPI.IN_PLACE or type(sent) is np.ndarray
        ):
            before = waits_for_device(arguments, self.resources.devices.is_direct)
            if before is not None:
                before()
        call_native(self.comm, arguments)
        self.last_plan = Native(reason)

    def make(
        self, arguments: Arguments, algorithm: Algorithm | str | None = None, repeats: bool = True
    ) -> AnyPlan:
        """Makes the plan of a persistent call; ``repeats`` unless it is for one run."""
        if self.watchdog is None:
            return self._make(arguments, algorithm, repeats)
        watchdog = self.watchdog
        call = watchdog.enter(arguments, str(algorithm or self.settings.algorithm))
        try:
            plan = self._make(arguments, algorithm, repeats)
        finally:
            watchdog.leave(call, completes=repeats)
        return Watched(plan, call, watchdog)

    def begin(self, arguments: Arguments, algorithm: Algorithm | str | None = None) -> Begun:
        """Begins a nonblocking call."""
        begun: Begun = self.make(arguments, algorithm, repeats=False).begin()
        return begun

    def _make(
        self, arguments: Arguments, algorithm: Algorithm | str | None, repeats: bool
    ) -> Plan | NativePlan:
        """A plan with tags and counters of its own; for one run, that of before if all ranks have
        it."""
        if algorithm is None:
            algorithm = self._validator.default(arguments.collective)
        call = self._validator.call(arguments, algorithm, ", as a plan")
        location, places, plan = self._rendezvous.location(call), None, None
        if location is not None:
            plan = None if repeats else self._cache.take(call, location)
            meeting = self._rendezvous.meet(location, plan)
            places = self._rendezvous.places(meeting)
            if plan is not None and not all_have(meeting, plan):
                plan.Free()
                plan = None
        keep = None
        if location and places and not (repeats or call.is_on_device):
            keep = partial(self._keep_begun, call, location, places)
        if plan is not None:
            plan.keep = keep
            self.last_plan = plan
            return plan
        made = self._binder.bind(self._tuned(call, places, measures=repeats), places, True, keep)
        self.last_plan = Native(made.reason) if isinstance(made, NativePlan) else made
        return made

    def _bound(self, call: Call) -> Plan | NativePlan:
        """A plan for a parsed call, once the ranks have met."""
        location, places = self._rendezvous.location(call), None
        if location is not None:
            places = self._rendezvous.places(self._rendezvous.meet(location))
        return self._binder.bind(call, places, planned=True)

    def _keep_begun(self, call: Call, location: Location, places: Places, plan: Plan) -> None:
        """Keeps a plan for the next nonblocking call on the same memory."""
        node = self.resources.node
        if node is None or not self._cache.keep(call, location, plan):
            plan.Free()
            return
        for place in places[node.rank]:
            node.used_by(place, plan)

    def leaves_to_native(
        self, collective: str, own: Any, other: Any = None, blocks: int = 1, unequal: bool = False
    ) -> bool:
        """Whether ``auto`` leaves a call to the MPI library before it is parsed, as parsing costs
        more than a small native collective takes.

        Args:
            own: the buffer that tells the call's size.
            other: its other buffer, if it has one.
            blocks: the largest buffer of any rank has at most so many times the bytes of ``own``.
            unequal: whether the call is a v-variant.
        """
        limits = self._unequal_native_below if unequal else self._native_below
        below, dtypes, barred = limits[collective]
        is_array = type(own) is ndarray and own.dtype in dtypes
        nbytes = own.nbytes if is_array else nbytes_of(own, dtypes, barred)
        if nbytes is None or nbytes * blocks >= below or self.progress.plans:
            return False
        if not (
            (is_array and type(other) is ndarray and other.dtype is own.dtype)  # most are
            or other is None
            or other is MPI.IN_PLACE
            or nbytes_of(other, dtypes, barred) is not None
        ):
            return False
        self.last_plan = _LEFT_TO_NATIVE
        return True

    def _forget(self) -> None:
        """Calls are looked at anew: the ranks' memory is not what it was."""
        self._cache.forget_calls()
        self._native_below.clear()
        self._unequal_native_below.clear()

    def tags(self) -> Tags:
        """Tags that no other plan has; collective.

        Raises:
            CollectiveError: on all ranks, if there are more plans than tags.
        """
        return self._binder.tags()

    @property
    def channel(self) -> MPI.Intracomm:
        """The duplicate.  No plan uses the last tag, ``MPI.TAG_UB``.  Collective at first use."""
        return self.resources.channel

    def complete(self, *requests: MPI.Request) -> None:
        """Waits for ``requests`` while the plans that are under way move along."""
        try:
            while not MPI.Request.Testall(requests):
                self.progress.advance()
        except BaseException as error:  # a signal handler's
            self.progress.leave("an agreement of the ranks", error)
            self.progress.keep(requests)
            raise
