"""Processes that read samples ahead, in the order of requests."""

import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

from collectives.errors import words
from mpitrain.arrays import Array
from mpitrain.data.dataset import DataError, Indexed, Samples

if TYPE_CHECKING:
    from mpitrain.data.slots import Room, Slot, Told
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
    """

    part: str
    epoch: int
    indices: Array


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
                yield _read(self._parts, request)
            return
        rest, under_way = iter(requests), deque[int]()
        while True:
            for request in islice(rest, len(self._slots) - len(under_way)):
                under_way.append(self._ask(request))
            if not under_way:
                return
            number = under_way.popleft()
            told = self._answer(number)
            if isinstance(told, str):
                raise DataError(told)
            found = self._room.samples(self._slots[number % len(self._slots)], told)
            # The slot will be written again.
            yield Samples(found.inputs.copy(), found.labels.copy())

    def _ask(self, request: Request) -> int:
        number, self._turn = self._turn, self._turn + 1
        worker = number % self.workers
        try:
            self._pipes[worker].send((number, request))
        except OSError as error:
            raise DataError(self._gone(worker)) from error
        return number

    def _answer(self, number: int) -> Any:
        """Answer to the request of this number; drops those to others before it."""
        worker = number % self.workers
        while True:
            try:
                found, told = self._pipes[worker].recv()
            except (EOFError, OSError) as error:
                raise DataError(self._gone(worker)) from error
            if found == number:
                return told

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
    while True:
        try:
            number, request = pipe.recv()
        except (EOFError, OSError):  # also where it was closed before it had read all answers
            return
        told: Told | str
        try:
            told = room.put(slots[number % len(slots)], _read(parts, request))
        except DataError as error:
            told = str(error)
        except Exception as error:
            told = f"samples {request.indices}: {words(error)}"
        try:
            pipe.send((number, told))
        except OSError:
            return


def _end(processes: list[Any], pipes: list[Connection]) -> None:
    for pipe in pipes:
        pipe.close()
    for process in processes:
        process.join(0.2)
        process.kill()
        process.join()
    processes.clear()
    pipes.clear()
