"""Carries out the calls of a communicator: finds or binds a plan for each, and runs it."""

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from mpi4py import MPI
from numpy import ndarray

from collectives import extras
from collectives.algorithms import Algorithm
from collectives.calls.arguments import Arguments
from collectives.calls.bind import Binder
from collectives.calls.fast_path import Limits, nbytes_of
from collectives.calls.native import waits_for_device
from collectives.calls.native_plan import Native, NativePlan, NativeRequest
from collectives.calls.plan_cache import CachedCall, Key, PlanCache
from collectives.calls.rendezvous import Location, Rendezvous, all_have
from collectives.calls.resources import Resources
from collectives.calls.settings import Settings
from collectives.calls.turn import Turn
from collectives.calls.validate import Validator
from collectives.errors import CollectiveError, InvalidBuffer
from collectives.execution.plan import Plan
from collectives.execution.traffic import Traffic
from collectives.execution.transport import Meeting
from collectives.failure.watched_plan import WatchedPlan

AnyPlan = Plan | NativePlan | WatchedPlan
#: A nonblocking call under way.
Begun = Plan | NativeRequest | WatchedPlan
#: As it is: a small call asks for it.
IN_PLACE = MPI.IN_PLACE


class Engine:
    """The state of one communicator: its duplicate for messages, its plans, its memory.

    Attributes:
        comm: the communicator.
        progress: plans that are under way.
        watchdog: watches all calls, if there is a timeout.
        settings: options of the communicator.
        last_plan: plan of the last call.
        library: mpi4py's methods, for calls that go to the MPI library unparsed.
    """

    def __init__(self, comm: MPI.Intracomm, settings: Settings) -> None:
        self.settings = settings
        self.library: Any = MPI.Intracomm
        self.resources = Resources(comm, settings)
        self.comm, self.progress = comm, self.resources.progress
        self.progress.expect_rank()
        timeout = settings.timeout
        self.watchdog = extras.Watchdog(MPI.Intracomm(comm), timeout) if timeout else None
        #: Watches blocks that wait for other ranks; see :meth:`watch`.
        self._block_watchdog = self.watchdog
        self._underway = self.progress.plans
        self.last_plan: AnyPlan | Native | None = None
        self._limits = Limits(self.resources)
        self._turn = Turn()
        self._validator = Validator(comm, self.resources)
        self._cache = PlanCache()
        self._rendezvous = Rendezvous(self.resources, self._limits.of_auto)
        self._binder = Binder(self.resources)

    def watch(self) -> None:
        """Starts a watchdog of :meth:`waiting` alone if settings name no timeout.

        It sees no collectives on arrays, as ranks leave different numbers of them to MPI.
        """
        may_watch = self.settings.timeout is None and self._block_watchdog is None
        if may_watch and self.comm.size > 1:
            self._block_watchdog = extras.Watchdog(MPI.Intracomm(self.comm))
            weakref.finalize(self, self._block_watchdog.drop).atexit = False

    def close_watchdog(self) -> None:
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

    def set_traffic(self, traffic: Traffic | None) -> None:
        """Counts in ``traffic`` what plans send that are made from now on; ``None`` stops that."""
        self.progress.traffic = traffic
        self._cache.free()
        self._limits.clear()

    @contextmanager
    def changing_memory(self, what: str) -> Iterator[None]:
        """A block in which all ranks change their memory, after all plans have ended."""
        self.progress.expect_whole()
        try:
            with self._turn, self.after_plans(what):
                self._validator.agree(what)
                # An address may name other memory from now on.
                self._cache.forget_calls()
                self._limits.clear()
                yield
        except (CollectiveError, MemoryError):  # raised on all ranks
            raise
        except BaseException as error:
            self.progress.leave(what, error)
            raise

    def prepare(self) -> None:
        """Makes what is made at first use; collective."""
        with self._turn, self.after_plans("prepare"):
            self._validator.agree("prepare")
            self.resources.prepare()

    def close(self) -> None:
        """Frees the plans and the duplicate; collective."""
        with self._turn, self.after_plans("close"):
            if self.progress.left:  # plans may remain that cannot end
                self.progress.forget()
            self._cache.free()
            self._limits.clear()
            self.resources.close()
        self.close_watchdog()

    def revoke(self) -> None:
        """Drops everything without the other ranks, some of which may be dead."""
        self.close_watchdog()
        self._cache.forget()
        self._limits.clear()
        self.progress.forget()
        self.resources.revoke()

    def run(self, arguments: Arguments, algorithm: Algorithm | str | None = None) -> None:
        """Makes a blocking call: runs the plan of an earlier such call, or else parses it."""
        if not self._turn.take():
            self._turn.refuse()
        watchdog, watched, meeting = self.watchdog, None, None
        try:
            asked = self.settings.algorithm if algorithm is None else algorithm
            if watchdog is not None:
                watched = watchdog.enter(arguments, str(asked))
            if asked == "native" and not self.settings.parses_native:
                self._run_native(self._validator.for_native(arguments), "asked for")
                return
            key = None if self.settings.check else self._cache.key(arguments, algorithm)
            if key is not None and (entry := self._cache.find(key)) is not None:
                if entry.location is not None:
                    meeting = self._rendezvous.meet_again(entry.location)
                if meeting == entry.meeting:  # all ranks use the memory of before, or need not meet
                    if entry.plan is None:
                        self._run_native(arguments, "as before")
                    else:
                        self._run_plan(entry.plan, arguments)
                    return
            self._run_parsed(arguments, algorithm, key, meeting)
        except BaseException as error:
            if meeting is not None:
                self._leave(arguments.collective, error)
            if watchdog is not None and watched is not None and not self.progress.left:
                watchdog.calls.refuse(watched, error)
            raise
        finally:
            if watchdog is not None and watched is not None:
                watchdog.calls.leave(watched)
            self._turn.give()

    def _run_parsed(
        self,
        arguments: Arguments,
        algorithm: Algorithm | str | None,
        key: Key | None,
        meeting: Meeting | None,
    ) -> None:
        """Parses a call, and runs the plan of an earlier such call or a new one; ``meeting``: what
        all ranks brought, if they have met already."""
        if algorithm is None:
            # The first lookup is collective: ranks with plain arrays did it in leaves_to_native.
            self._limits[arguments.collective]
            algorithm = self._validator.default(arguments.collective)
        if algorithm == "native" and not self.settings.parses_native:
            self._run_native(arguments, "asked for")
            return
        call = self._validator.call(arguments, algorithm, "")
        location, places = self._rendezvous.location(call, unordered=False), None
        try:
            if location is not None:
                meeting = meeting or self._rendezvous.meet(location)
                places = self._rendezvous.places(meeting, call)
            found = self._cache.take(call.key, places)
            made = found or self._binder.bind(call, places, planned=False)
            plan = None if isinstance(made, NativePlan) else made
            kept = plan is None or self._cache.keep(call.key, places, plan)
            # When the call comes again, the MPI library gets the caller's arguments as they are.
            if key is not None and kept and (plan is not None or call.has_buffers_of(arguments)):
                self._cache.remember(key, CachedCall(arguments.op, plan, location, meeting))
            if plan is None:
                self._run_native(call.arguments, made.reason)
                return
            self._run_plan(plan, call.arguments)
        except BaseException as error:
            if meeting is not None:
                self._leave(call, error)
            raise
        if not kept:
            plan.Free()

    def _leave(self, what: object, error: BaseException) -> None:
        """An error ends a call for which the ranks have met, or whose plan has tags already: if
        other ranks may not have it, they go on with what this rank's next call is not."""
        is_alone = not isinstance(error, CollectiveError | MPI.Exception)
        if is_alone or isinstance(error, InvalidBuffer):
            self.progress.leave(str(what), error)

    def _run_plan(self, plan: Plan, arguments: Arguments) -> None:
        """Runs a plan of ours."""
        self.last_plan = plan
        try:
            plan()
        except BaseException:
            self.progress.keep(arguments)
            raise

    def _run_native(self, arguments: Arguments, reason: str) -> None:
        """Runs the MPI library's own collective."""
        # Another rank may wait for a plan before it comes here, and a blocking collective advances
        # none.  A nonblocking one would not match the others' blocking ones.
        self.progress.drain()
        if self.progress.traffic is not None:
            self.progress.traffic.leave(self._validator.least_bytes(arguments))
        sent, received = arguments.sendbuf, arguments.recvbuf
        plain = type(received) is ndarray and (sent is MPI.IN_PLACE or type(sent) is ndarray)
        wait = None if plain else waits_for_device(arguments, self.resources.devices.is_direct)
        if wait is not None:
            wait()
        getattr(MPI.Intracomm, arguments.method)(self.comm, *arguments.for_mpi4py)
        self.last_plan = Native(reason)

    def make(
        self,
        arguments: Arguments,
        algorithm: Algorithm | str | None = None,
        repeats: bool = True,
        in_order: bool = False,
    ) -> AnyPlan:
        """Makes the plan of a persistent call, or of one nonblocking call if not ``repeats``.

        Args:
            in_order: the ranks begin all runs of such plans in one order, as blocking calls.
        """
        watchdog = self.watchdog
        with self._turn:
            if watchdog is None:
                return self._make(arguments, algorithm, repeats, in_order=in_order)
            call = watchdog.enter(arguments, str(algorithm or self.settings.algorithm))
            try:
                plan = self._make(arguments, algorithm, repeats, in_order=in_order)
                return WatchedPlan(plan, call, watchdog)
            except BaseException as error:
                if not self.progress.left:
                    watchdog.calls.refuse(call, error)
                raise
            finally:
                watchdog.calls.leave(call, completes=repeats)

    def begin(self, arguments: Arguments, algorithm: Algorithm | str | None = None) -> Begun:
        """Begins a nonblocking call."""
        if self.watchdog is not None or self.settings.check:
            return self.make(arguments, algorithm, repeats=False).begin()
        with self._turn:
            key = self._cache.key(arguments, algorithm)
            entry = None if key is None else self._cache.find(key := ("begun", *key))
            plan, meeting = (None, None) if entry is None else self._begun_before(entry, arguments)
            return (plan or self._make(arguments, algorithm, False, key, meeting)).begin()

    def _begun_before(
        self, entry: CachedCall, arguments: Arguments
    ) -> tuple[Plan | None, Meeting | None]:
        """The plan of an earlier nonblocking call if all ranks have it, and what they brought."""
        parsed, location = entry.parsed, entry.location
        assert location is not None, "the ranks met for it"
        plan = self._cache.take(parsed, location)
        if plan is None:
            return None, None
        meeting = self._rendezvous.meet_again(location, plan)
        if meeting is None or not all_have(meeting, plan):
            plan.Free()
            return None, meeting
        plan.keep, self.last_plan = partial(self._keep_begun, parsed, location, arguments), plan
        return plan, meeting

    def _make(
        self,
        arguments: Arguments,
        algorithm: Algorithm | str | None,
        repeats: bool,
        key: Key | None = None,
        meeting: Meeting | None = None,
        in_order: bool = False,
    ) -> Plan | NativePlan:
        """A plan that can run beside others; for one run, an earlier plan if all ranks have it."""
        if algorithm is None:
            algorithm = self._validator.default(arguments.collective)
        call = self._validator.call(arguments, algorithm, ", as a plan")
        try:
            location = self._rendezvous.location(call, unordered=not in_order)
            places, plan, keep = None, None, None
            if location is not None:
                if meeting is None:
                    plan = None if repeats else self._cache.take(call.key, location)
                    meeting = self._rendezvous.meet(location, plan)
                places = self._rendezvous.places(meeting, call)
                if plan is not None and not all_have(meeting, plan):
                    plan.Free()
                    plan = None
            if location and places and not (repeats or call.is_on_device):
                keep = partial(self._keep_begun, call.key, location, call)
                if key is not None:
                    self._cache.remember(
                        key, CachedCall(arguments.op, None, location, None, call.key)
                    )
            if plan is None:
                made = self._binder.bind(call, places, True, keep, in_order=in_order)
                self.last_plan = Native(made.reason) if isinstance(made, NativePlan) else made
                return made
            plan.keep, self.last_plan = keep, plan
            return plan
        except BaseException as error:
            self._leave(call, error)
            raise

    def _keep_begun(self, parsed: Key | None, location: Location, held: object, plan: Plan) -> None:
        """Keeps a plan that has ended for the next nonblocking call on the same memory, which
        ``held``, the call or its arguments, has kept until now."""
        if self.resources.node is None or not self._cache.keep(parsed, location, plan):
            plan.Free()

    def leaves_to_native(
        self, algorithm: object, collective: str, own: Any, other: Any = None, blocks: int = 1
    ) -> bool:
        """Whether a call goes to the MPI library unparsed, as parsing takes longer than a small
        native collective: ``auto`` leaves it to the library, or ``native`` is asked for.

        Args:
            algorithm: the one that the call names.
            collective: its name, with a ``v`` behind it for a v-variant.
            own: buffer that tells the call's size.
            other: the other buffer, if there is one.
            blocks: upper bound of the bytes of any rank's buffer, as a multiple of ``own``.
        """
        if algorithm is None:
            below, types, plan = self._limits[collective]
        elif algorithm == "native":
            below, types, plan = self._limits["native"]
        else:
            return False
        nbytes: int | None
        if type(own) is ndarray and (dtype := own.dtype) in types:  # the usual case
            nbytes = own.nbytes
            if type(other) is ndarray and other.dtype is dtype:
                other = None
        else:
            nbytes = nbytes_of(own, types)
        if nbytes is None or nbytes * blocks >= below or self._underway:
            return False
        if not (other is None or other is IN_PLACE or nbytes_of(other, types) is not None):
            return False
        self.last_plan = plan
        return True
