"""Watchdog thread: notices a collective that does not end, reports who is missing, ends the job."""

import atexit
import contextlib
import os
import selectors
import signal
import socket
import sys
import threading
from contextlib import AbstractContextManager
from time import monotonic, sleep
from typing import Any, NoReturn

from mpi4py import MPI

from collectives.failure.abort import expect_end
from collectives.failure.failure_detector import FailureDetector, Neighbour
from collectives.failure.history import Entered, History, size_of
from collectives.failure.peers import MOST_BYTES, Peers
from collectives.failure.report import deadlock, is_meeting, note, place, report, stacks
from collectives.failure.wakeup import Wakeup

#: Exit status of the job after a stall, as of timeout(1).
STATUS = 124
#: Exit status of the job after a fault that a restart would meet again.
FAULT = 1
#: Seconds for the other ranks to answer.
_ANSWER_S = 1.0
#: Seconds that ranks wait for one of them to write the report.
_GRACE_S = 3.0
#: Seconds between two looks of an answering thread at whether it is still needed.
_TURN_S = 0.1
#: Seconds between two looks of the watching thread.
_SELECT_S = 0.25
#: Seconds for the exit handlers of a rank whose program has ended.
_LEFT_S = 3.0
#: Seconds until a waiting rank asks the others, and the further seconds for each rank below it.
_LOOK_S, _BESIDE_S = 5.0, 0.01
#: Seconds until a waiting rank writes a note, once for each place; 0 if a rank is silent.
_NOTE_S = 30.0
#: Most communicators in an answer.
_MOST_SHOWN = 100


class Watchdog:
    """Watches one communicator's collectives.  The constructor is collective.

    A call that cannot end ends the job with status 1, in seconds: a rank's program has ended
    without it, or two ranks wait for each other in calls on two communicators.  Slowness is no
    fault: after half a minute, once for each place, a rank writes whom it waits for, and waits on.

    After ``timeout`` seconds in one call, one of the waiting ranks reports the call, every rank's
    progress, the missing ranks and their stacks, and the job ends with status 124.  Neighbours see
    a process die.  ``SIGUSR2`` makes a rank write its last calls to stderr, even inside of MPI.

    Args:
        comm: a communicator; the watchdog sends no messages on it later.
        timeout: seconds; without one, slowness, deaths and signals are ignored.

    Raises:
        ValueError: ``timeout`` is no finite number above 0.
    """

    #: Held while one closes, as it may hand on what it hears of to another one.
    _closing = threading.RLock()

    def __init__(self, comm: MPI.Intracomm, timeout: float | None = None) -> None:
        if timeout is not None and not 0 < timeout < float("inf"):
            raise ValueError(
                f"the watchdog's timeout is {timeout} s; it must be a finite number above 0"
            )
        self.timeout = timeout or float("inf")
        self.calls = History()
        self._comm = comm
        self._peers = Peers(comm)
        self._detector = None
        world = MPI.Comm.Compare(comm, MPI.COMM_WORLD) in (MPI.IDENT, MPI.CONGRUENT)
        # One ring is enough.  Threads may make watchdogs in another order on each rank, so the
        # ranks agree whether there is a ring.
        here = any(other._detector for other in _running())
        if timeout and world and not any(comm.allgather(here)):
            hosts, addresses = self._peers.hosts, self._peers.addresses
            self._detector = FailureDetector(comm, hosts, addresses, self._peers.token)
        self._looked_at = float("-inf")
        self._noted: set[str] = set()
        self._process = os.getpid()
        self._stop = False
        self._signals, self._signalled = socket.socketpair()
        for end in (self._signals, self._signalled):
            end.setblocking(False)
        #: There if it is the one that hears of signals.
        self._wakeup = Wakeup.to(self._signalled) if timeout else None
        atexit.register(self._leave)
        self._thread = _Thread(self)
        self._thread.start()

    def enter(self, arguments: Any, algorithm: str | None) -> Entered:
        """Records that a call begins.  Cost: about a microsecond, with its end."""
        size = size_of(arguments.recvbuf) or size_of(arguments.sendbuf)
        return self.calls.enter(arguments.collective, algorithm, size)

    def waiting(self, what: str, *, numbered: bool) -> AbstractContextManager[None]:
        """Marks a block that waits for other ranks in another way than a collective."""
        return self.calls.during(what, numbered=numbered)

    def __str__(self) -> str:
        """Text with the last calls of this rank."""
        peers = self._peers
        among = f", among {peers.group}" if peers.group else ""
        place = f"rank {peers.job[peers.rank]} of {MPI.COMM_WORLD.size}{among}"
        return f"[{place}] {self.calls}"

    def close(self) -> None:
        """Stops watching."""
        with self._closing:
            self.drop()
            heir = next((it for it in _running() if it.timeout < float("inf")), None)
            if self._wakeup is not None and heir is not None:
                heir._wakeup = self._wakeup
                heir._wakeup.lead(heir._signalled)
            elif self._wakeup is not None:
                self._wakeup.close()
        self._thread.join(_ANSWER_S + _GRACE_S)
        if self._detector:
            self._detector.close()

    def drop(self) -> None:
        """Stops watching, without waiting for the thread."""
        atexit.unregister(self._leave)
        self._stop = True
        with contextlib.suppress(OSError):  # it is closed already
            self._signalled.send(b"\0")

    def _leave(self) -> None:
        """Says to the other ranks that this rank will make no collective any more."""
        if os.getpid() == self._process:
            self._peers.say_farewell(self.calls.made)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(self._peers.socket, selectors.EVENT_READ)
            ready.register(self._signals, selectors.EVENT_READ)
            for neighbour in self._detector.alive if self._detector else ():
                ready.register(neighbour.connection, selectors.EVENT_READ, neighbour)
            while not self._stop:
                for key, _ in ready.select(min(_SELECT_S, self.timeout / 4)):
                    if isinstance(key.data, Neighbour):
                        ready.unregister(key.fileobj)
                    self._read(key)
                call = self.calls.current
                if call is not None:
                    self._look(call, monotonic() - call.begun)
        for end in (self._signals, self._signalled):
            end.close()
        self._peers.close()

    def _read(self, key: selectors.SelectorKey) -> None:
        """Reads from a socket that has become readable."""
        if self._detector and isinstance(key.data, Neighbour):
            if text := self._detector.listen(key.data):
                _say(text)
        elif key.fileobj is self._peers.socket:
            self._peers.answer(self._status())
        elif signal.SIGUSR2 in self._signals.recv(100):
            _say(report_calls())

    def _status(self) -> dict[str, Any]:
        """This rank's answer to a question of another one."""
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
            "made_on": {other._peers.token: other.calls.made for other in running[-_MOST_SHOWN:]},
            "threads": len(self.calls.threads.union(*(one.calls.threads for one in running))),
            "elsewhere": [(token, it.number, str(it)) for token, it in elsewhere[:1]],
            "polls": monotonic() - self.calls.polled < min(1.0, 0.5 * self.timeout),
            # Ranks enter a call one after the other, and the first one asks all at once.
            "waits": waited > 0.5 * self.timeout,
            "where": place(),
            "stack": stacks()[-MOST_BYTES // 2 :],
        }

    def _look(self, call: Entered, waited: float) -> None:
        """Acts on a call that has lasted ``waited`` seconds."""
        if waited > self.timeout:
            self._stalled(call)
            return
        peers, now = self._peers, monotonic()
        # Messages of ranks that have ended may be under way, but not for so long.
        none_comes = waited > _NOTE_S and len(peers.ended) == peers.size - 1
        left = [
            rank
            for rank, (made, heard) in peers.ended.items()
            if (made < call.number and now - heard > _LEFT_S if call.numbered else none_comes)
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
        if why := deadlock(peers, answers):
            self._end(report(peers, call, answers, f"cannot end: {why}"), FAULT)
        where = answers[peers.rank]["where"]
        silent = len(answers) + len(peers.ended) < peers.size
        if (silent or waited > _NOTE_S) and where not in self._noted:
            self._noted.add(where)
            if text := note(peers, call, answers, waited):
                _say(text)

    def _asked(self, call: Entered) -> dict[int, dict[str, Any]]:
        """Statuses of all ranks that answer; empty if the call has ended meanwhile."""
        over = threading.Event()
        answering = self._start_answering(over)
        answers = self._peers.ask(_ANSWER_S)
        over.set()
        if answering.is_alive():
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
        """Ends the job with a report, or after another rank has written one."""
        self._start_answering(threading.Event())
        if text:
            _say(text)
        else:
            sleep(_GRACE_S)
        sys.stdout.flush()
        sys.stderr.flush()
        sleep(0.2)  # the launcher forwards it
        expect_end()
        if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            self._comm.Abort(status)
        os._exit(status)

    def _start_answering(self, over: threading.Event) -> threading.Thread:
        """A thread that answers the other ranks, which may ask at the same time, until ``over``."""
        thread = threading.Thread(target=self._serve, args=(over,), name="watchdog", daemon=True)
        with contextlib.suppress(RuntimeError):  # Python 3.12.0 and .1 start none at exit
            thread.start()
        return thread

    def _serve(self, over: threading.Event) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(self._peers.socket, selectors.EVENT_READ)
            while not over.is_set():
                if ready.select(_TURN_S):
                    self._peers.answer(self._status())


class _Thread(threading.Thread):
    """The background thread of a watchdog."""

    def __init__(self, watchdog: Watchdog) -> None:
        # As a daemon it keeps no job from ending.
        super().__init__(target=watchdog._watch, name="watchdog", daemon=True)
        self.watchdog = watchdog


def report_calls() -> str:
    """Text with the last calls of this process on each watched communicator."""
    return "\n".join(str(watchdog) for watchdog in _running() if watchdog.calls)


def _running() -> list[Watchdog]:
    """Open watchdogs of this process."""
    threads = [thread for thread in threading.enumerate() if isinstance(thread, _Thread)]
    return [thread.watchdog for thread in threads if not thread.watchdog._stop]


def _say(text: str) -> None:
    print(f"{text}\n", file=sys.stderr, end="", flush=True)  # as one piece
