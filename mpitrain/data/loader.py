"""Processes that read samples ahead, in the order of requests."""

import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

from collectives.errors import words
from mpitrain.arrays import Array
from mpitrain.data.dataset import DataError, Indexed, Samples
from mpitrain.data.places import StreamPlace

if TYPE_CHECKING:
    from mpitrain.data.slots import Room, Slot, Told
    from mpitrain.data.stream import WritePlace
from mpitrain import extras

#: Requests of a process at a time: one under way, one waiting.
_AHEAD = 2
_PR_SET_PDEATHSIG = 1
#: Signals to stop that reach all processes of a job; readers go on until their rank is done.
_LEFT_TO_THE_RANK = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


@dataclass(frozen=True)
class Request:
    """Request for samples.

    Attributes:
        part: ``"train"`` or ``"test"``.
        epoch: epoch of the samples.
        indices: their indices.
        place: place in a stream at which a run goes on; None: nothing new of it.
    """

    part: str
    epoch: int
    indices: Array
    place: StreamPlace | None = None


class Loader:
    """Reads the samples of requests in turn: in this process, or ahead of time in others.

    Processes serve requests by turns, so that order and values are the same for any number of them.
    They are forked, see the data set as it is now, and answer through shared memory.  They end with
    this process, however it ends.

    Attributes:
        workers: number of processes.
    """

    def __init__(self, parts: Mapping[str, Indexed], workers: int = 0, most: int = 0) -> None:
        """Starts the processes; ``most``: samples of the largest request.

        Raises:
            DataError: memory is short, or processes cannot be started.
        """
        self.workers = workers
        self._parts = parts
        self._last = -1
        self._told: dict[int, Told | str] = {}
        self._goes_on: StreamPlace | None = None
        self._room: Room | None = extras.Room(parts, most) if workers else None
        self._turn = 0
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._slots: list[Slot] = []
        try:
            if self._room:
                self._slots = [extras.Slot(self._room.bytes) for _ in range(_AHEAD * workers)]
            for number in range(workers):
                self._start(number)
        except OSError as error:
            _end(self._processes, self._pipes)
            raise DataError(
                f"data.workers = {workers}: a process that reads ahead cannot be started: {error}"
            ) from error
        # Ends before multiprocessing's exit, which would wait for processes that wait for us.
        self._end = Finalize(self, _end, (self._processes, self._pipes), exitpriority=100)

    def _start(self, number: int) -> None:
        context = get_context("fork")
        ours, theirs = context.Pipe()
        others = [*self._pipes, ours]
        arguments = (self._parts, self._room, self._slots, theirs, others, os.getpid())
        process = context.Process(target=_work, args=arguments, name=f"loader {number}")
        self._pipes.append(ours)
        # A signal that comes before the process leaves it to its rank waits until then.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_THE_RANK)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._processes.append(process)
        theirs.close()

    def read(self, requests: Iterable[Request]) -> Generator[Samples]:
        """Samples of each request, in turn; later requests are read meanwhile.

        Raises:
            DataError: samples cannot be read, or their process has ended.
        """
        if not self._room:
            for request in requests:
                yield _read(self._parts, self._placed(request))
            return
        rest, under_way = iter(requests), deque[tuple[int, str]]()
        self._told.clear()
        while True:
            for request in islice(rest, len(self._slots) - len(under_way)):
                under_way.append((self._ask(request), request.part))
            if not under_way:
                return
            number, part = under_way.popleft()
            if part == "train":
                self._last = number
            told = self._told.pop(number, None) or self._answer(number)
            if isinstance(told, str):
                raise DataError(told)
            found = self._room.samples(self._slots[number % len(self._slots)], told)
            # The slot will be written again.
            yield Samples(found.inputs.copy(), found.labels.copy())

    def place(self) -> StreamPlace | None:
        """Place in the stream behind the samples that were read last, if it keeps states.

        A process writes it once it has served the requests under way.

        Raises:
            DataError: the stream does not give its state, or what follows cannot be read.
        """
        if not self._room:
            return _written(_place(self._parts))
        if self._last < 0:
            return None
        worker = self._last % self.workers
        self._send(worker, (self._last, None))
        found = self._answer(self._last, keeps=True)
        if isinstance(found, str):
            raise DataError(found)
        return found

    def go_on(self, place: StreamPlace | None) -> None:
        """Let the stream begin at this place, which some request of its epoch is behind."""
        self._goes_on = place

    def _placed(self, request: Request) -> Request:
        if self._goes_on is None or request.part != "train":
            return request
        place, self._goes_on = self._goes_on, None
        return replace(request, place=place)

    def _ask(self, request: Request) -> int:
        number, self._turn = self._turn, self._turn + 1
        self._send(number % self.workers, (number, self._placed(request)))
        return number

    def _send(self, worker: int, asked: tuple[int, Request | None]) -> None:
        try:
            self._pipes[worker].send(asked)
        except OSError as error:
            raise DataError(self._gone(worker)) from error

    def _answer(self, number: int, *, keeps: bool = False) -> Any:
        """Answer to the request of this number; drops or keeps those to others before it."""
        worker = number % self.workers
        while True:
            try:
                found, told = self._pipes[worker].recv()
            except (EOFError, OSError) as error:
                raise DataError(self._gone(worker)) from error
            if found == number:
                return told
            if keeps:
                self._told[found] = told

    def _gone(self, worker: int) -> str:
        process = self._processes[worker]
        process.join(5)
        code = process.exitcode
        killed = code is not None and code < 0
        how = f"killed by {signal.Signals(-code).name}" if killed else f"exit code {code}"
        return (
            f"process {process.pid}, which reads samples ahead, has ended ({how}); where memory is "
            "short, take fewer data.workers"
        )

    def close(self) -> None:
        """Ends the processes."""
        self._end()
        self._processes, self._pipes = [], []


def _read(parts: Mapping[str, Indexed], request: Request) -> Samples:
    samples = parts[request.part]
    if request.place and extras.Streamed.made(samples):
        samples.go_on(request.place)
    if extras.OwnSamples.made(samples):
        samples = samples.in_epoch(request.epoch)
    return samples[request.indices]


def _work(
    parts: Mapping[str, Indexed],
    room: "Room",
    slots: "list[Slot]",
    pipe: Connection,
    others: list[Connection],
    parent: int,
) -> None:
    """Answers requests, in a process, until the other end is closed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for one in _LEFT_TO_THE_RANK:
        signal.signal(one, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _LEFT_TO_THE_RANK)
    if os.getppid() != parent:  # it ended before the line above
        return
    for other in others:  # or they would stay open when our parent closes them
        other.close()
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # a fork has no other threads
    places: dict[int, WritePlace | str | None] = {}
    while True:
        try:
            number, request = pipe.recv()
        except (EOFError, OSError):  # also where it was closed before it had read all answers
            return
        told: Told | StreamPlace | str | None
        try:
            if request is None:
                told = _written(places[number])
            else:
                slot = slots[number % len(slots)]
                told = room.put(slot, _read(parts, request))
                if request.part == "train":  # places behind the last answer and ahead
                    places = dict([*places.items(), (number, _place(parts))][-_AHEAD - 1 :])
        except DataError as error:
            told = str(error)
        except Exception as error:
            told = f"samples {request and request.indices}: {words(error)}"
        try:
            pipe.send((number, told))
        except OSError:
            return


def _place(parts: Mapping[str, Indexed]) -> "WritePlace | str | None":
    """The place in the stream to train on, if it keeps states; a text: why it does not give it."""
    train = parts["train"]
    try:
        return train.place() if extras.Streamed.made(train) else None
    except DataError as error:
        return str(error)


def _written(place: "WritePlace | str | None") -> StreamPlace | None:
    if isinstance(place, str):
        raise DataError(place)
    return place and place()


def _end(processes: list[Any], pipes: list[Connection]) -> None:
    for pipe in pipes:
        pipe.close()
    for process in processes:
        process.join(0.2)
        process.kill()
        process.join()
    processes.clear()
    pipes.clear()
