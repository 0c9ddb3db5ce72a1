"""The thread that notices that a collective does not end, says who is missing, and ends the job."""

import os
import selectors
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any

from mpi4py import MPI

from collectives.launch import expect_end
from collectives.watchdog.history import Entered, History, size_of
from collectives.watchdog.neighbours import Neighbour, Neighbours
from collectives.watchdog.peers import MOST_BYTES, Peers

#: The job's exit status after a stall, as of timeout(1).
STATUS = 124
#: How long the others may take to answer, and how long ranks wait for one to write the report.
_ANSWER_S = 1.0
_GRACE_S = 3.0
#: How often a thread that answers looks whether it is still needed.
_LOOK_S = 0.1


class Watchdog:
    """Watches one communicator's collectives.  Making it is collective.

    After ``timeout`` seconds in one call, one of the ranks that wait reports which call that is,
    how far every rank is, who is missing and where these are, and the job ends with status 124.
    ``SIGUSR2`` makes a rank write its last calls to stderr, even while it is stuck inside MPI.

    Args:
        comm: a communicator; no messages are sent on it later.
        timeout: seconds.
    """

    def __init__(self, comm: MPI.Intracomm, timeout: float) -> None:
        if not 0 < timeout < float("inf"):
            raise ValueError(
                f"the watchdog's timeout is {timeout} s; it must be a finite number above 0"
            )
        self.timeout = timeout
        self.calls = History()
        self._comm = comm
        self._peers = Peers(comm)
        self._neighbours = None
        world = MPI.Comm.Compare(comm, MPI.COMM_WORLD) in (MPI.IDENT, MPI.CONGRUENT)
        # One ring sees all.  Each rank's threads make theirs in an order of their own, so the ranks
        # say whether they have one.
        if world and not any(comm.allgather(any(other._neighbours for other in _running()))):
            hosts, addresses = self._peers.hosts, self._peers.addresses
            self._neighbours = Neighbours(comm, hosts, addresses, self._peers.token)
        self._stop = False
        self._wakeup, self._signalled = socket.socketpair()
        for end in (self._wakeup, self._signalled):
            end.setblocking(False)
        self._previous = self._listen_to_signals()
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
        self._stop = True
        self._signalled.send(b"\0")
        self._thread.join(_ANSWER_S + _GRACE_S)
        if self._neighbours:
            self._neighbours.close()
        if threading.current_thread() is threading.main_thread() and self._previous is not None:
            signal.signal(signal.SIGUSR2, self._previous)
            signal.set_wakeup_fd(-1)
            for other in _running():  # hears of signals from now on
                other._previous = other._listen_to_signals()
                break
        for end in (self._wakeup, self._signalled):
            end.close()
        self._peers.close()

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
                for key, _ in ready.select(min(0.25, self.timeout / 4)):
                    if self._neighbours and isinstance(key.data, Neighbour):
                        ready.unregister(key.fileobj)
                        if text := self._neighbours.listen(key.data):
                            _say(text)
                    elif key.fileobj is self._peers.socket:
                        self._peers.answer(self._status())
                    elif signal.SIGUSR2 in self._wakeup.recv(100):
                        _say(report_calls())
                call = self.calls.current
                if call is not None and monotonic() - call.begun > self.timeout:
                    self._stalled(call)

    def _status(self) -> dict[str, Any]:
        call = self.calls.current
        waited = 0.0 if call is None else monotonic() - call.begun
        return {
            "rank": self._peers.rank,
            "completed": self.calls.completed,
            "call": None if call is None else str(call),
            "number": None if call is None else call.number,
            "made": self.calls.made,
            "polls": monotonic() - self.calls.polled < 0.5 * self.timeout,
            # Ranks enter one after the other, and the first to complain asks all at once.
            "waits": waited > 0.5 * self.timeout,
            "stack": _stacks()[-MOST_BYTES // 2 :],
        }

    def _stalled(self, call: Entered) -> None:
        over = threading.Event()
        answering = threading.Thread(
            target=self._keep_answering, args=(over,), name="watchdog", daemon=True
        )
        answering.start()
        answers = self._peers.ask(_ANSWER_S)
        if self.calls.current is not call:  # it went on after all
            over.set()
            answering.join()
            return
        answers[self._peers.rank] = self._status()
        waiting = [r for r, s in answers.items() if s["waits"] and s["number"] == call.number]
        if self._peers.rank == min(waiting, default=self._peers.rank):
            _say(self._report(call, answers))
        else:
            sleep(_GRACE_S)  # the other one writes it
        sys.stdout.flush()
        sys.stderr.flush()
        sleep(0.2)  # for the launcher to forward it
        expect_end()
        if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            self._comm.Abort(STATUS)
        os._exit(STATUS)

    def _keep_answering(self, over: threading.Event) -> None:
        """The others ask at the same time."""
        with selectors.DefaultSelector() as ready:
            ready.register(self._peers.socket, selectors.EVENT_READ)
            while not over.is_set():
                if ready.select(_LOOK_S):
                    self._peers.answer(self._status())

    def _report(self, call: Entered, answers: dict[int, dict[str, Any]]) -> str:
        """What one of the waiting ranks says for all."""
        peers = self._peers
        collective = f"collective number {call.number}"
        if not call.numbered:
            collective = f"wait behind {collective}"
        which = f"{collective} of {peers.group}" if peers.group else f"the ranks' {collective}"
        lines = [
            f"{which} has not ended after {self.timeout:g} s; rank {peers.job[peers.rank]}: {call}"
        ]
        missing = []
        for rank, number in enumerate(peers.job):
            status = answers.get(rank)
            if status is None:
                where = f"on {peers.hosts[rank]}"
                lines.append(f"  rank {number} {where} does not answer: it is dead or stopped")
                missing.append(rank)
                continue
            # One that polls has come as far as its last call, and is in none when it is asked.
            polls = status["call"] is None and status["polls"]
            elsewhere = "it polls with Test" if polls else "it is busy elsewhere"
            there = status["call"] or f"none of them: {elsewhere}"
            lines.append(f"  rank {number} has completed {status['completed']}, is in {there}")
            come = status["made"] if polls else status["number"]
            if come is None or come < call.number:
                missing.append(rank)
        who = ", ".join(str(peers.job[rank]) for rank in missing)
        nobody = "none: the calls do not fit together (check=True)"
        if not call.numbered:
            nobody = "unknown, as only some of the ranks make this call"
        lines.append(f"missing: rank {who or nobody}")
        for rank in [peers.rank, *(r for r in missing if r in answers)]:
            lines.append(f"rank {peers.job[rank]} is here:\n{answers[rank]['stack']}")
        return "\n".join(lines)


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


class Watched:
    """A plan whose runs and waits are watched, by the number of the call that has made it.

    Runs have no numbers of their own: a rank may ``Wait`` where another calls ``Test``.
    """

    def __init__(self, plan: Any, made: Entered, watchdog: Watchdog) -> None:
        """``made``: the call that has made it."""
        self._plan = plan
        self._number = made.number
        self._collective, _, self._size = made.what
        self._watchdog = watchdog

    def __call__(self) -> None:
        """Runs the collective to its end."""
        with self.waiting():
            self._plan()

    def begin(self) -> Any:
        """Starts it, for one run; of a request of MPI's, that watches itself by this."""
        begun = self._plan.begin()
        if begun is self._plan:
            return self
        begun.watched = self
        return begun

    def Test(self) -> bool:
        """Makes progress; returns whether it has completed."""
        done: bool = self._plan.Test()
        self.tested(done)
        return done

    def tested(self, done: bool) -> None:
        """What a ``Test`` has found."""
        if done:
            self._watchdog.calls.complete(self._number)
        else:
            self._watchdog.calls.polled = monotonic()

    def Wait(self) -> None:
        """Completes it."""
        with self.waiting("Wait for"):
            self._plan.Wait()

    def synchronize(self) -> None:
        """Completes it; the host can read the results."""
        with self.waiting("Wait for"):
            self._plan.synchronize()

    @contextmanager
    def waiting(self, how: str | None = None) -> Iterator[None]:
        """Marks a block that waits for its run."""
        calls = self._watchdog.calls
        what = how, self._collective, self._plan.algorithm, self._size
        call = calls.enter(*what, of=self._number)
        try:
            yield
        finally:
            calls.leave(call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)


def _stacks() -> str:
    """Where all threads of this process are, but for the watchdog's own."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        name = names.get(ident, "?")
        if name == "watchdog" or ident == threading.get_ident():
            continue
        parts.append(f"thread {name}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(parts)


def _say(text: str) -> None:
    print(f"{text}\n", file=sys.stderr, end="", flush=True)  # as one piece


def _nothing(*_: object) -> None:
    """A handler that makes Python notice the signal."""
