"""The thread that notices that a collective does not end, says who is missing, and ends the job."""

import atexit
import contextlib
import os
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any, NoReturn

from mpi4py import MPI

from collectives.failure.abort import expect_end
from collectives.failure.history import Entered, History, size_of
from collectives.failure.neighbours import Neighbour, Neighbours
from collectives.failure.peers import MOST_BYTES, Peers
from collectives.failure.report import deadlock, is_meeting, note, place, report, stacks

#: The job's exit status after a stall, as of timeout(1), and after what would come again.
STATUS = 124
FAULT = 1
#: How long the others may take to answer, and how long ranks wait for one to write the report.
_ANSWER_S = 1.0
_GRACE_S = 3.0
#: How often a thread that answers looks whether it is still needed, and one that watches at all.
_TURN_S = 0.1
_SELECT_S = 0.25
#: How long a rank may be waited for that has ended: its exit handlers may be at work.
_LEFT_S = 3.0
#: After so long a rank that waits asks the others, each so much later than the one before it.
_LOOK_S = 5.0
_BESIDE_S = 0.01
#: After so long it says whom it waits for, once for each place; at once if one does not answer.
_NOTE_S = 30.0
#: Communicators of which a rank answers.
_MOST_TOLD = 100


class Watchdog:
    """Watches one communicator's collectives.  Making it is collective.

    A call that cannot end ends the job with status 1, in seconds: a rank's program has ended
    without it, or two ranks wait for each other in calls on two communicators.  Slowness is no
    fault: after half a minute, and once for each place, a rank says whom it waits for, and waits.

    After ``timeout`` seconds in one call, one of the ranks that wait reports which call that is,
    how far every rank is, who is missing and where these are, and the job ends with status 124.
    Neighbours see a process die, and ``SIGUSR2`` makes a rank write its last calls to stderr, even
    while it is stuck inside MPI.

    Args:
        comm: a communicator; no messages are sent on it later.
        timeout: seconds; without one, slowness, deaths and signals are left alone.
    """

    def __init__(self, comm: MPI.Intracomm, timeout: float | None = None) -> None:
        if timeout is not None and not 0 < timeout < float("inf"):
            raise ValueError(
                f"the watchdog's timeout is {timeout} s; it must be a finite number above 0"
            )
        self.timeout = timeout or float("inf")
        self.calls = History()
        self._comm = comm
        self._peers = Peers(comm)
        self._neighbours = None
        world = MPI.Comm.Compare(comm, MPI.COMM_WORLD) in (MPI.IDENT, MPI.CONGRUENT)
        # One ring sees all.  Each rank's threads make theirs in an order of their own, so the ranks
        # say whether they have one.
        here = any(other._neighbours for other in _running())
        if timeout and world and not any(comm.allgather(here)):
            hosts, addresses = self._peers.hosts, self._peers.addresses
            self._neighbours = Neighbours(comm, hosts, addresses, self._peers.token)
        self._looked_at = float("-inf")
        self._noted: set[str] = set()
        self._process = os.getpid()
        self._stop = False
        self._wakeup, self._signalled = socket.socketpair()
        for end in (self._wakeup, self._signalled):
            end.setblocking(False)
        self._previous = self._listen_to_signals() if timeout else None
        atexit.register(self._leave)
        self._thread = _Thread(self)
        self._thread.start()

    def enter(self, arguments: Any, algorithm: str | None) -> Entered:
        """A call begins.  Cost: about a microsecond, with :meth:`leave`."""
        size = size_of(arguments.recvbuf) or size_of(arguments.sendbuf)
        return self.calls.enter(arguments.collective, algorithm, size)

    def leave(self, call: Entered, completes: bool = True) -> None:
        """It has ended; ``completes`` unless its collective is under way from now on."""
        self.calls.leave(call, completes)

    @contextmanager
    def waiting(self, what: str, *, numbered: bool) -> Iterator[None]:
        """Something else that waits for other ranks."""
        call = self.calls.enter(what, numbered=numbered)
        try:
            yield
        finally:
            self.calls.leave(call)

    def __str__(self) -> str:
        """The last calls of this rank, for people."""
        peers = self._peers
        among = f", among {peers.group}" if peers.group else ""
        place = f"rank {peers.job[peers.rank]} of {MPI.COMM_WORLD.size}{among}"
        return f"[{place}] {self.calls}"

    def close(self) -> None:
        """Stops watching."""
        listened = self._previous is not None
        if listened and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR2, self._previous)
            signal.set_wakeup_fd(-1)
            for other in _running():  # hears of signals from now on
                if other is not self and other.timeout < float("inf"):
                    other._previous = other._listen_to_signals()
                    break
        self.drop()
        self._thread.join(_ANSWER_S + _GRACE_S)
        if self._neighbours:
            self._neighbours.close()

    def drop(self) -> None:
        """Stops watching, and waits for nothing."""
        atexit.unregister(self._leave)
        self._stop = True
        with contextlib.suppress(OSError):  # it is closed already
            self._signalled.send(b"\0")

    def _leave(self) -> None:
        """The program ends, and this rank will come to no collective any more."""
        if os.getpid() == self._process:
            self._peers.say_farewell(self.calls.made)

    def _listen_to_signals(self) -> Any:
        """Python's own handlers run only between byte codes, so not while a rank is inside MPI.

        The file descriptor is written to at once, and the thread reads it.
        """
        if threading.current_thread() is not threading.main_thread():
            return None
        other = signal.set_wakeup_fd(self._signalled.fileno(), warn_on_full_buffer=False)
        if other != -1:  # an event loop's, which needs it more
            signal.set_wakeup_fd(other)
            return None
        previous = signal.getsignal(signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, previous if callable(previous) else _nothing)
        return previous

    def _watch(self) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(self._peers.socket, selectors.EVENT_READ)
            ready.register(self._wakeup, selectors.EVENT_READ)
            for neighbour in self._neighbours.alive if self._neighbours else ():
                ready.register(neighbour.connection, selectors.EVENT_READ, neighbour)
            while not self._stop:
                for key, _ in ready.select(min(_SELECT_S, self.timeout / 4)):
                    if self._neighbours and isinstance(key.data, Neighbour):
                        ready.unregister(key.fileobj)
                        if text := self._neighbours.listen(key.data):
                            _say(text)
                    elif key.fileobj is self._peers.socket:
                        self._peers.answer(self._status())
                    elif signal.SIGUSR2 in self._wakeup.recv(100):
                        _say(report_calls())
                call = self.calls.current
                if call is not None:
                    self._look(call, monotonic() - call.begun)
        for end in (self._wakeup, self._signalled):
            end.close()
        self._peers.close()

    def _status(self) -> dict[str, Any]:
        call = self.calls.current
        waited = 0.0 if call is None else monotonic() - call.begun
        running = [watchdog for watchdog in _running() if watchdog is not self]
        inside = ((other, other.calls.current) for other in running)
        elsewhere = [(other._peers.token, it) for other, it in inside if it and is_meeting(it)]
        return {
            "rank": self._peers.rank,
            "completed": self.calls.completed,
            "call": None if call is None else str(call),
            "what": None if call is None else call.words,
            "number": None if call is None else call.number,
            "meets": call is not None and is_meeting(call),
            "made": self.calls.made,
            "made_on": {other._peers.token: other.calls.made for other in running[-_MOST_TOLD:]},
            "elsewhere": [(token, it.number, str(it)) for token, it in elsewhere[:1]],
            "polls": monotonic() - self.calls.polled < min(1.0, 0.5 * self.timeout),
            # Ranks enter one after the other, and the first to complain asks all at once.
            "waits": waited > 0.5 * self.timeout,
            "where": place(),
            "stack": stacks()[-MOST_BYTES // 2 :],
        }

    def _look(self, call: Entered, waited: float) -> None:
        """A call has lasted for so many seconds."""
        if waited > self.timeout:
            self._stalled(call)
            return
        peers, now = self._peers, monotonic()
        left = [
            rank
            for rank, (made, heard) in peers.ended.items()
            if call.numbered and made < call.number and now - heard > _LEFT_S
        ]
        if left and waited > _LEFT_S:
            if answers := self._asked(call):
                who = ", ".join(str(peers.job[rank]) for rank in left)
                self._end(report(peers, call, answers, f"cannot end without rank {who}"), FAULT)
            return
        # One rank asks for all: the lowest of those that wait.
        due = max(self._looked_at, peers.left_to) + max(_LOOK_S, 0.5 * waited)
        if waited < _LOOK_S + _BESIDE_S * min(peers.rank, 200) or now < due:
            return
        self._looked_at = now
        if not (answers := self._asked(call)):
            return
        if why := deadlock(peers.token, answers):
            why = f"cannot end: {why.format(*peers.job)}"
            self._end(report(peers, call, answers, why), FAULT)
        where = answers[peers.rank]["where"]
        silent = len(answers) + len(peers.ended) < peers.size
        if (silent or waited > _NOTE_S) and where not in self._noted:
            self._noted.add(where)
            if text := note(peers, call, answers, waited):
                _say(text)

    def _asked(self, call: Entered) -> dict[int, dict[str, Any]]:
        """What all ranks answer; nothing if the call has gone on after all."""
        over = threading.Event()
        answering = threading.Thread(
            target=self._keep_answering, args=(over,), name="watchdog", daemon=True
        )
        answering.start()
        answers = self._peers.ask(_ANSWER_S)
        over.set()
        answering.join()
        if self.calls.current is not call:
            return {}
        answers[self._peers.rank] = self._status()
        return answers

    def _stalled(self, call: Entered) -> None:
        if not (answers := self._asked(call)):
            return
        waiting = [r for r, s in answers.items() if s["waits"] and s["number"] == call.number]
        text = ""
        if self._peers.rank == min(waiting, default=self._peers.rank):
            why = f"has not ended after {self.timeout:g} s"
            text = report(self._peers, call, answers, why)
        self._end(text, STATUS)

    def _end(self, text: str, status: int) -> NoReturn:
        """Ends the job with these words, or after those of another rank."""
        answering = threading.Thread(
            target=self._keep_answering, args=(threading.Event(),), name="watchdog", daemon=True
        )
        answering.start()
        if text:
            _say(text)
        else:
            sleep(_GRACE_S)
        sys.stdout.flush()
        sys.stderr.flush()
        sleep(0.2)  # for the launcher to forward it
        expect_end()
        if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            self._comm.Abort(status)
        os._exit(status)

    def _keep_answering(self, over: threading.Event) -> None:
        """The others ask at the same time."""
        with selectors.DefaultSelector() as ready:
            ready.register(self._peers.socket, selectors.EVENT_READ)
            while not over.is_set():
                if ready.select(_TURN_S):
                    self._peers.answer(self._status())


class _Thread(threading.Thread):
    """What a watchdog does in the background."""

    def __init__(self, watchdog: Watchdog) -> None:
        # A daemon: a thread that waits for a hang must not keep a job from ending.
        super().__init__(target=watchdog._watch, name="watchdog", daemon=True)
        self.watchdog = watchdog


def report_calls() -> str:
    """The last calls of this process on each communicator that is watched, for people."""
    return "\n".join(str(watchdog) for watchdog in _running() if watchdog.calls)


def _running() -> list[Watchdog]:
    """Those of this process that are not closed."""
    threads = [thread for thread in threading.enumerate() if isinstance(thread, _Thread)]
    return [thread.watchdog for thread in threads if not thread.watchdog._stop]


def _say(text: str) -> None:
    print(f"{text}\n", file=sys.stderr, end="", flush=True)  # as one piece


def _nothing(*_: object) -> None:
    """A handler that makes Python notice the signal."""
