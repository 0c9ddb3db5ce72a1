"""Carries out the calls of a communicator: finds or binds a plan for each, and runs it."""

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

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
from collectives.failure import Watchdog, WatchedPlan

AnyPlan = Plan | NativePlan | WatchedPlan
#: A nonblocking call under way.
Begun = Plan | NativeRequest | WatchedPlan
_LEFT_TO_NATIVE = Native(
    "nothing of ours was measured to be faster here; collectives tune, with mpirun, measures"
)


class Engine:
    """The state of one communicator: its duplicate for messages, its plans, its memory.

    Attributes:
        settings: options of the communicator.
        watchdog: watches all calls, if there is a timeout.
        progress: plans that are under way.
        last_plan: plan of the last call.
    """

    def __init__(self, comm: MPI.Intracomm, settings: Settings) -> None:
        self.comm = comm
        self.settings = settings
        self.progress = Progress()
        self.resources = Resources(comm, settings, self.complete, self.progress.drain)
        timeout = settings.timeout
        self.watchdog = Watchdog(MPI.Intracomm(comm), timeout) if timeout else None
        #: Watches blocks that wait for other ranks; see :meth:`watch`.
        self._block_watchdog = self.watchdog
        delays = settings.transport.delays
        #: Calls by ``native`` are parsed, too: these settings check or replace them.
        self._parses_native = bool(settings.check or settings.reproducible or delays)
        self.last_plan: AnyPlan | Native | None = None
        self._limits = Limits(self.resources, self.progress)
        self._unequal_limits = Limits(self.resources, self.progress, unequal=True)
        self._validator = Validator(comm, self.resources, self.progress)
        self._cache = PlanCache()
        self._rendezvous = Rendezvous(self.resources, self.progress, self._limits.of_auto)
        self._binder = Binder(self.resources, self.progress)
        self._autotune = Autotune(self.resources, self.progress, self._binder, self._meet_and_bind)

    def empty(self, shape: Any, dtype: npt.DTypeLike, memory: str) -> npt.NDArray[Any]:
        """Array of zeros in memory that the node's ranks share, or else in ordinary memory."""
        with self._changing_memory("empty"):
            return self.resources.empty(shape, dtype, memory)

    def count(self, traffic: Traffic | None) -> None:
        """Counts in ``traffic`` what plans send that are made from now on; ``None`` stops that."""
        self.progress.traffic = traffic
        self._forget_calls()
        self._cache.free()

    def share(self, array: Any) -> None:
        """Moves an array into memory that the node's ranks share, if possible."""
        with self._changing_memory("share"):
            self.resources.share(array)

    @contextmanager
    def _changing_memory(self, what: str) -> Iterator[None]:
        """A block in which all ranks change their memory, after all plans have ended."""
        with self._watched(Arguments(what, None, None), None):
            self.progress.expect_whole()
            try:
                self.progress.drain()
                self._validator.agree(what)
                # An address may name other memory from now on.
                self._forget_calls()
                yield
            except (CollectiveError, MemoryError):  # raised on all ranks
                raise
            except BaseException as error:
                self.progress.leave(what, error)
                raise

    def close(self) -> None:
        """Frees the plans and the duplicate; collective."""
        with self.after_plans("close"):
            if self.progress.left:  # plans may remain that cannot end
                self.progress.forget()
            self._cache.free()
            self._forget_calls()
            self.resources.close()
        self._close_watchdog()

    def revoke(self) -> None:
        """Drops everything without the other ranks, some of which may be dead."""
        self._close_watchdog()
        self._cache.forget()
        self._forget_calls()
        self.progress.forget()
        self.resources.revoke()

    def watch(self) -> None:
        """Starts a watchdog of :meth:`waiting` alone if settings name no timeout.

        It sees no collectives on arrays, as ranks leave different numbers of them to MPI.
        """
        if self.settings.timeout is None and self._block_watchdog is None and self.comm.size > 1:
            self._block_watchdog = Watchdog(MPI.Intracomm(self.comm))
            weakref.finalize(self, self._block_watchdog.drop).atexit = False

    def _close_watchdog(self) -> None:
        if self._block_watchdog is not None:
            self._block_watchdog.close()
            self._block_watchdog = self.watchdog = None

    def waiting(self, what: str, by_all: bool = True) -> AbstractContextManager[None]:
        """A block that waits for other ranks; ``by_all``: all ranks enter it, in the same order."""
        watchdog = self._block_watchdog
        return watchdog.waiting(what, numbered=by_all) if watchdog else nullcontext()

    def after_plans(self, what: str) -> AbstractContextManager[None]:
        """A block that all ranks enter, after the plans under way have ended."""
        if self._block_watchdog is None:  # ten times as fast as a generator
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
        """A block that the watchdog, if there is one, watches as a call."""
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
        """Runs the plan of an earlier call with the same arguments, or else parses the call."""
        asked = self.settings.algorithm if algorithm is None else algorithm
        if asked == "native" and not self._parses_native:
            self._execute(None, self._validator.for_native(arguments), "asked for")
            return
        key = None if self.settings.check else self._cache.key(arguments, algorithm)
        meeting = None
        if key is not None and (entry := self._cache.find(key)) is not None:
            if entry.location is not None:
                meeting = self._rendezvous.meet_again(entry.location)
            if meeting == entry.meeting:  # all ranks use the memory of before, or need not meet
                self._execute(entry.plan, arguments, "as before")
                return
        self._run_parsed(arguments, algorithm, key, meeting)

    def _run_parsed(
        self,
        arguments: Arguments,
        algorithm: Algorithm | str | None,
        key: Key | None,
        meeting: Meeting | None,
    ) -> None:
        """Parses a call, and runs the plan of an earlier such call or a new one.

        Args:
            key: name of the call in the cache; ``None``: it is not kept.
            meeting: locations of all ranks' buffers, if they have met already.
        """
        if algorithm is None:
            # The first lookup is collective: ranks with plain arrays did it in leaves_to_native.
            self._limits[arguments.collective]
            algorithm = self._validator.default(arguments.collective)
        if algorithm == "native" and not self._parses_native:
            self._execute(None, arguments, "asked for")
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
        # When the call comes again, the MPI library gets the caller's arguments as they are.
        if key is not None and kept and (plan is not None or call.has_buffers_of(arguments)):
            self._cache.remember(key, CachedCall(arguments.op, plan, location, meeting))
        self._execute(plan, call.arguments, reason)
        if plan is not None and not kept:
            plan.Free()

    def _tuned(self, call: Call, places: Places | None, measures: bool) -> Call:
        """The call with the algorithm that autotune has found, if it has."""
        if not self.settings.autotune:
            return call
        choice = self._autotune.choice(call, places, measures)
        return replace(call, algorithm=choice.algorithm, why=choice.reason) if choice else call

    def _execute(self, plan: Plan | None, arguments: Arguments, reason: str) -> None:
        """Runs a plan, or the MPI library's own collective in its place."""
        if plan is not None:
            self.last_plan = plan
            try:
                plan()
            except BaseException:
                self.progress.keep(arguments)
                raise
            return
        # Another rank may wait for a plan before it comes here, and a blocking collective advances
        # none.  A nonblocking one would not match the others' blocking ones.
        self.progress.drain()
        if self.progress.traffic is not None:
            self.progress.traffic.leave()
        sent, received = arguments.sendbuf, arguments.recvbuf
        plain = type(received) is ndarray and (sent is MPI.IN_PLACE or type(sent) is ndarray)
        wait = None if plain else waits_for_device(arguments, self.resources.devices.is_direct)
        if wait is not None:
            wait()
        call_native(self.comm, arguments)
        self.last_plan = Native(reason)

    def make(
        self, arguments: Arguments, algorithm: Algorithm | str | None = None, repeats: bool = True
    ) -> AnyPlan:
        """Makes the plan of a persistent call, or of one nonblocking call if not ``repeats``."""
        watchdog = self.watchdog
        if watchdog is None:
            return self._make(arguments, algorithm, repeats)
        call = watchdog.enter(arguments, str(algorithm or self.settings.algorithm))
        try:
            plan = self._make(arguments, algorithm, repeats)
        finally:
            watchdog.leave(call, completes=repeats)
        return WatchedPlan(plan, call, watchdog)

    def begin(self, arguments: Arguments, algorithm: Algorithm | str | None = None) -> Begun:
        """Begins a nonblocking call."""
        begun: Begun = self.make(arguments, algorithm, repeats=False).begin()
        return begun

    def _make(
        self, arguments: Arguments, algorithm: Algorithm | str | None, repeats: bool
    ) -> Plan | NativePlan:
        """A plan that can run beside others; for one run, an earlier plan if all ranks have it."""
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

    def _meet_and_bind(self, call: Call) -> Plan | NativePlan:
        """Lets the ranks meet, and makes a plan for a parsed call."""
        location, places = self._rendezvous.location(call), None
        if location is not None:
            places = self._rendezvous.places(self._rendezvous.meet(location))
        return self._binder.bind(call, places, planned=True)

    def _keep_begun(self, call: Call, location: Location, places: Places, plan: Plan) -> None:
        """Keeps a plan that has ended for the next nonblocking call on the same memory."""
        node = self.resources.node
        if node is None or not self._cache.keep(call, location, plan):
            plan.Free()
            return
        for place in places[node.rank]:
            node.used_by(place, plan)

    def leaves_to_native(
        self, collective: str, own: Any, other: Any = None, blocks: int = 1, unequal: bool = False
    ) -> bool:
        """Whether ``auto`` leaves a call to the MPI library unparsed, as parsing takes longer than
        a small native collective.

        Args:
            own: buffer that tells the call's size.
            other: the other buffer, if there is one.
            blocks: upper bound of the bytes of any rank's buffer, as a multiple of ``own``.
            unequal: whether the call is a v-variant.
        """
        limits = self._unequal_limits if unequal else self._limits
        below, dtypes, barred = limits[collective]
        is_array = type(own) is ndarray and own.dtype in dtypes
        nbytes = own.nbytes if is_array else nbytes_of(own, dtypes, barred)
        if nbytes is None or nbytes * blocks >= below or self.progress.plans:
            return False
        if not (
            (is_array and type(other) is ndarray and other.dtype is own.dtype)  # the usual case
            or other is None
            or other is MPI.IN_PLACE
            or nbytes_of(other, dtypes, barred) is not None
        ):
            return False
        self.last_plan = _LEFT_TO_NATIVE
        return True

    def _forget_calls(self) -> None:
        """Forgets calls and limits, as the ranks' memory or the count of traffic changes."""
        self._cache.forget_calls()
        self._limits.clear()
        self._unequal_limits.clear()

    def tags(self) -> Tags:
        """Tags that no other plan has; collective.

        Raises:
            CollectiveError: on all ranks: no tags are left.
        """
        return self._binder.tags()

    @property
    def channel(self) -> MPI.Intracomm:
        """The duplicate; collective at first use.  No plan uses the last tag, ``MPI.TAG_UB``."""
        return self.resources.channel

    def complete(self, *requests: MPI.Request) -> None:
        """Waits for ``requests``, and progresses the plans under way meanwhile."""
        try:
            while not MPI.Request.Testall(requests):
                self.progress.advance()
        except BaseException as error:  # raised by a signal handler
            self.progress.leave("an agreement of the ranks", error)
            self.progress.keep(requests)
            raise
