"""What a communicator does with a call: understand it, agree on it, bind it or find it, run it."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI
from numpy import ndarray

from collectives.algorithms import Algorithm
from collectives.calls.alternating import AlternatingPlan
from collectives.calls.arguments import Arguments
from collectives.calls.binding import best_of_ours, bind_call, memory_of, tags_of
from collectives.calls.call import Call
from collectives.calls.meeting import Meetings, all_have, shared_places, still_there
from collectives.calls.native import Native, NativePlan, call_native, waits_for_device
from collectives.calls.native_request import NativeRequest
from collectives.calls.recent import Entry, Plans, Recent
from collectives.calls.resources import Resources
from collectives.calls.settings import Settings
from collectives.calls.small import Limits
from collectives.calls.tuner import Choice
from collectives.calls.turns import Trial, Turns
from collectives.calls.understanding import Understanding
from collectives.calls.unread import DTYPES, REDUCED, nbytes_of
from collectives.contracts import contract
from collectives.errors import CollectiveError
from collectives.execution.lanes import Lane, Mask
from collectives.execution.plan import Plan
from collectives.execution.shared import Places
from collectives.execution.traffic import Traffic
from collectives.execution.underway import Underway
from collectives.failure import Watchdog, Watched

AnyPlan = Plan | NativePlan | AlternatingPlan | Watched
#: What is under way for one run.
Begun = Plan | NativeRequest | Watched


_LEFT_TO_NATIVE = Native(
    "nothing of ours was measured to be faster here; collectives tune, with mpirun, measures"
)


def _by(call: Call, choice: Choice) -> Call:
    return replace(call, algorithm=choice.algorithm, why=choice.reason)


class Engine:
    """The state of one communicator: its duplicate, its plans, its memory.

    Attributes:
        settings: what the communicator was made with.
        last_plan: the plan of the last call.
        underway: its plans that are under way.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        settings: Settings,
    ) -> None:
        self.comm = comm
        self.settings = settings
        self.underway = Underway()
        self.resources = Resources(comm, settings, self.complete, self.underway.drain)
        timeout = settings.timeout
        self.watchdog = Watchdog(MPI.Intracomm(comm), timeout) if timeout else None
        #: Who sees the blocks that wait for other ranks; the watchdog sees all calls.
        self._onlooker = self.watchdog
        # Settings that native calls have to do with, too.
        delays = settings.transport.delays
        self._reads_all = bool(settings.check or settings.reproducible or delays)
        self.last_plan: AnyPlan | Native | None = None
        self._understanding = Understanding(
            comm, settings, self.resources, self.underway, self.complete
        )
        self._recent = Recent()
        self._plans = Plans()
        self._begun = Plans()
        self._native_below = Limits(self.resources, self.underway)
        self._unequal_native_below = Limits(self.resources, self.underway, unequal=True)
        self._turns = Turns(self.resources, self.complete)
        self._meetings = Meetings(
            self.resources, self.underway, self._native_below.of_auto, self._forget
        )

    def empty(self, shape: Any, dtype: npt.DTypeLike, memory: str) -> npt.NDArray[Any]:
        """Zeros in the node's memory, or in ordinary memory where that cannot be."""
        with self._changing_memory("empty"):
            return self.resources.empty(shape, dtype, memory)

    def attach(self) -> bool:
        """Whether the ranks read one another's ordinary memory.  Collective at first use."""
        return self._meetings.attach()

    def count(self, traffic: Traffic | None) -> None:
        """Adds what is sent from now on to ``traffic``, but for plans that are made already."""
        self.underway.traffic = traffic
        self._forget()
        self._free_plans()

    def share(self, array: Any) -> None:
        """Moves an array into the node's memory, where that can be."""
        with self._changing_memory("share"):
            self.resources.share(array)

    @contextmanager
    def _changing_memory(self, what: str) -> Iterator[None]:
        """All ranks are in ``what``, and no plan is under way."""
        with self._watched(Arguments(what, None, None), None):
            self.underway.expect_whole()
            try:
                self.underway.drain()
                self._understanding.agree(what)
                # From now on, the ranks meet, and memory may lie where other memory lay before.
                self._forget()
                yield
            except (CollectiveError, MemoryError):  # on all ranks
                raise
            except BaseException as error:
                self.underway.leave(what, error)
                raise

    def close(self) -> None:
        """Releases plans and the duplicate.  Collective."""
        with self.after_plans("close"):
            if self.underway.left:  # the others have ended
                self.underway.forget()
            self._free_plans()
            self._forget()
            self.resources.close()
        self._close_watchdog()

    def revoke(self) -> None:
        """Lets go of everything without asking the other ranks, some of which may be dead."""
        self._close_watchdog()
        self._plans.forget()
        self._begun.forget()
        self._forget()
        self.underway.forget()
        self.resources.revoke()

    def watch(self) -> None:
        """A watchdog without a limit, where settings have said nothing of one.  It sees no calls
        of arrays, whose shortest way the ranks take unequally often."""
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
            self.underway.drain()
            return nullcontext()
        return self._after_plans(what)

    @contextmanager
    def _after_plans(self, what: str) -> Iterator[None]:
        with self.waiting(what):
            self.underway.drain()
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
        """A blocking call."""
        if self.watchdog is None:
            self._run(arguments, algorithm)
            return
        with self._watched(arguments, algorithm or self.settings.algorithm):
            self._run(arguments, algorithm)

    def _run(self, arguments: Arguments, algorithm: Algorithm | str | None) -> None:
        """Looks a plan up by the memory of the call, first as it stands in the call
        (:class:`Recent`), then as it was read, or binds one."""
        asked = self.settings.algorithm if algorithm is None else algorithm
        read = self._reads_all
        if asked == "native" and not read:
            self._complete(None, self._understanding.in_mpi_words(arguments), "asked for")
            return
        key = None if self.settings.check else self._recent.key(arguments, algorithm)
        meeting = None
        if key is not None and (entry := self._recent.find(key)) is not None:
            if entry.words is None:
                self._complete(entry.plan, arguments, "as before")
                return
            node = self.resources.node
            if node is not None and still_there(entry.words, node):
                meeting = self._meetings.meet(entry.words)
                if meeting == entry.meeting:  # nobody came with other memory
                    self._complete(entry.plan, arguments, "as before")
                    return
        if algorithm is None:
            # Ranks with plain arrays have asked for it before they came here; others do so now.
            self._native_below[arguments.collective]
            algorithm = self._understanding.default(arguments.collective)
        if algorithm == "native" and not read:
            self._complete(None, arguments, "asked for")
            return
        call = self._understanding.call(arguments, algorithm, "")
        places = None
        own = self._meetings.words(call)
        if (node := self.resources.node) is not None and own is not None:
            if meeting is None:
                meeting = self._meetings.meet(own)
            places = shared_places(meeting, node)
        call, trial = self._in_turn(call, places)
        plan = self._plans.take(call, places)
        reason = call.why if trial else "as before"
        if plan is not None and trial:
            plan.reason = reason
        if plan is None:
            # Blocking calls follow one another, so all can use the same tags and counters.
            made = bind_call(call, self.resources, places, self.underway, None)
            plan, reason = (None if isinstance(made, NativePlan) else made), made.reason
        kept = plan is None or self._plans.keep(call, places, plan)
        # What is found again is not read again, and native takes the caller's own words.
        found_again = plan is not None or call.has_buffers_of(arguments)
        tries = trial is not None and trial.kept is None
        if key is not None and kept and found_again and not tries:
            self._recent.remember(key, Entry(arguments.op, plan, own, meeting))
        begun = self._turns.begin() if tries else 0.0
        self._complete(plan, call.arguments, reason)
        if tries and trial is not None:
            self._turns.end(trial, begun)
        if plan is not None and not kept:
            plan.Free()

    def _in_turn(self, call: Call, places: Places | None) -> tuple[Call, Trial | None]:
        """The call by the algorithm whose turn it is, if ``auto`` tries them by turns."""
        if not self.settings.turns:
            return call, None
        memory = memory_of(call, self.resources, places)
        self.underway.expect_whole()
        trial = self._turns.of(call, memory, lambda: best_of_ours(call, self.resources, memory))
        if trial is None:
            return call, None
        return _by(call, trial.turn), trial

    def _complete(self, plan: Plan | None, arguments: Arguments, reason: str) -> None:
        """Runs a plan, or the MPI library's own collective in its place."""
        if plan is not None:
            self.last_plan = plan
            try:
                plan()
            except BaseException:
                self.underway.keep(arguments)
                raise
            return
        # MPI's blocking collectives match none of its nonblocking ones, and no rank knows who else
        # has plans under way: whoever has, ends them first.  All ranks have started them.
        self.underway.drain()
        if self.underway.traffic is not None:
            self.underway.traffic.leave()
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
        self,
        arguments: Arguments,
        algorithm: Algorithm | str | None = None,
        repeats: bool = True,
    ) -> AnyPlan:
        """A persistent call; ``repeats`` unless it is for one run."""
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
        """A nonblocking call."""
        plan = self.make(arguments, algorithm, repeats=False)
        assert not isinstance(plan, AlternatingPlan), "only plans that repeat take turns"
        begun: Begun = plan.begin()
        return begun

    def _make(
        self, arguments: Arguments, algorithm: Algorithm | str | None, repeats: bool
    ) -> Plan | NativePlan | AlternatingPlan:
        """A plan of its own, with tags and counters of its own."""
        if algorithm is None:
            algorithm = self._understanding.default(arguments.collective)
        call = self._understanding.call(arguments, algorithm, ", as a plan")
        own, places, again = self._meetings.words(call), None, None
        if (node := self.resources.node) is not None and own is not None:
            again = None if repeats else self._begun.take(call, own)
            meeting = self._meetings.meet(own, again)
            places = shared_places(meeting, node)
            if again is not None and not all_have(meeting, again):
                again.Free()
                again = None
        keep = None
        if own and places and not (repeats or self.settings.turns or call.is_on_device):
            keep = partial(self._keep_begun, call, own, places)
        plan = again or self._plan(call, places, repeats, keep)
        if again is not None:
            again.keep = keep
        self.last_plan = Native(plan.reason) if isinstance(plan, NativePlan) else plan
        return plan

    def _keep_begun(self, call: Call, own: tuple[int, ...], places: Places, plan: Plan) -> None:
        """For the next nonblocking call on the same memory."""
        node = self.resources.node
        if node is None or not self._begun.keep(call, own, plan):
            plan.Free()
            return
        for place in places[node.rank]:
            node.used_by(place, plan)

    def _free_plans(self) -> None:
        self._plans.free()
        self._begun.free()

    def _plan(
        self,
        call: Call,
        places: Places | None,
        repeats: bool,
        keep: Callable[[Plan], object] | None,
    ) -> Plan | NativePlan | AlternatingPlan:
        def bound(call: Call) -> Plan | NativePlan:
            return bind_call(call, self.resources, places, self.underway, self._used_anywhere, keep)

        if not repeats and self.settings.turns:
            known = self._turns.known(call, memory_of(call, self.resources, places))
            return bound(call if known is None else _by(call, known))
        call, trial = self._in_turn(call, places)
        if trial is None or trial.kept is not None:
            return bound(call)
        own = Trial(trial.kind, trial.ours)
        native, ours = (bound(_by(call, Choice(name, call.why))) for name in ("native", own.ours))
        assert isinstance(native, NativePlan) and isinstance(ours, Plan), "as they were asked for"
        return AlternatingPlan(native, ours, own, self.channel, self.complete, self._turns.keep)

    def leaves_to_native(
        self,
        collective: str,
        own: Any,
        other: Any = None,
        blocks: int = 1,
        unequal: bool = False,
    ) -> bool:
        """Whether ``auto`` is native for a call, before it is read: reading it costs more than a
        small native collective takes.

        Args:
            own: the buffer that the call's size is told by.
            other: its other buffer, if it has one.
            blocks: as many times ``own`` is the largest buffer of any rank, or less.
            unequal: it is a v-variant's.
        """
        limits = self._unequal_native_below if unequal else self._native_below
        reduces = contract(collective).reduces
        is_array = type(own) is ndarray and own.dtype in (REDUCED if reduces else DTYPES)
        nbytes = own.nbytes if is_array else nbytes_of(own, reduces)
        if nbytes is None or nbytes * blocks >= limits[collective] or self.underway.plans:
            return False
        if not (
            (is_array and type(other) is ndarray and other.dtype is own.dtype)  # most are
            or other is None
            or other is MPI.IN_PLACE
            or nbytes_of(other, reduces) is not None
        ):
            return False
        self.last_plan = _LEFT_TO_NATIVE
        return True

    def _forget(self) -> None:
        """Calls are looked at anew: the ranks' memory is not what it was."""
        self._recent.clear()
        self._native_below.clear()
        self._unequal_native_below.clear()

    def lane(self) -> Lane:
        """Tags that no other plan has; collective.

        Raises:
            CollectiveError: on all ranks, if there are more plans than tags.
        """
        return tags_of(self.resources, self._used_anywhere)

    def _used_anywhere(self, used: Mask) -> Mask:
        """The numbers that any rank uses."""
        self.complete(self.channel.Iallreduce(MPI.IN_PLACE, used, MPI.BOR))
        return used

    @property
    def channel(self) -> MPI.Intracomm:
        """The duplicate.  No plan uses the last tag, ``MPI.TAG_UB``.  Collective at first use."""
        return self.resources.channel

    def complete(self, *requests: MPI.Request) -> None:
        """Waits for ``requests`` while the plans that are under way move along."""
        try:
            while not MPI.Request.Testall(requests):
                self.underway.progress()
        except BaseException as error:  # a signal handler's
            self.underway.leave("an agreement of the ranks", error)
            self.underway.keep(requests)
            raise
