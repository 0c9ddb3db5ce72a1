"""Means of gradients that do not wait for the slowest workers.

Rank 0 gathers the gradients of a step until enough have arrived, and sends their mean to all.  A
gradient that arrives later goes into the mean of the next open step, so that each counts once.  A
worker that begins a step after its mean was sent takes the mean and computes nothing in that step,
so that it catches up.  All workers take the same means in the same order and stay equal bit by bit.

In contrast, backup workers (Chen et al. 2016) discard late gradients.  Arrivals vary from run to
run: each step's record names the gradients in its mean.

Rank 0 is a worker, too, and forms a mean after its own gradient: all wait for a slow rank 0.
Long messages progress only while both sides are inside of MPI calls; rank 0 makes such calls
between the layers of its backward pass and at the end of a step.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import give_way
from mpitrain.arrays import Array
from mpitrain.config import Sync
from mpitrain.parallel.summation import KeptElements
from mpitrain.step.agreement import Agreed, StepReport
from mpitrain.step.gradient import GlobalGradient
from mpitrain.sync.message import Message, mean
from mpitrain.sync.strategy import Strategy
from mpitrain.sync.workers import Workers

#: Tags of messages.
_GRADIENT, _RESULT = 1, 2
#: Number of tests for a step's result before this rank computes a gradient.
_TESTS = 16


class Quorum(Strategy):
    """A step waits for ``needed`` of its gradients, and for no others.

    A result is a mean of gradients with the report of its step.  Cost of a step with s bytes of
    gradients on p workers: rank 0 receives and sends (p-1) s; each other rank sends s and receives
    s.  Memory on rank 0: at most ``behind`` results under way, and the gradients in no mean yet.

    Attributes:
        taken: steps of each worker whose gradients are in the mean of the last step.
    """

    algorithm = "quorum"

    def __init__(self, workers: Workers, sync: Sync) -> None:
        """Duplicate the communicator; collective."""
        self.workers = workers
        self._comm: Any = workers.comm.Dup()
        self._size, self._rank = workers.comm.size, workers.comm.rank
        self._is_root = self._rank == 0
        self._needed, self._behind = sync.needed(self._size), sync.behind
        self.reason = f"{self._needed} of {self._size} workers"
        self.keepers = [self]
        #: Whether this worker computes a gradient in the current step.
        self._computes = True
        # On rank 0: posted receives by worker, gradients in no mean yet, results under way.
        self._posted: dict[int, tuple[Message, MPI.Request]] = {}
        self._pending: list[Message] = []
        self._results: deque[tuple[Message, list[MPI.Request]]] = deque()
        # On other ranks: gradients under way, at most two, and the receive of the next result.
        self._sends: list[tuple[Message, MPI.Request]] = []
        self._next: tuple[Message, MPI.Request] | None = None
        # Gradients so far: sent by this worker; on rank 0, received from each worker.
        self._sent = 0
        self._received = np.zeros(self._size, int)
        # For checkpoints: sum of this worker's gradients in no mean yet; by worker, their number
        # and last step, counted from 1.
        self._late = np.zeros_like(workers.gradients)
        self._late_steps = np.zeros((self._size, 2))
        self._is_resumed = False

    def _message(self, worker: int) -> Message:
        tensors, like = len(self.workers.arena.tensors), self.workers.gradients
        return Message(self._size, tensors, like, worker)

    # -- a step

    def computes(self, step: int) -> bool:
        self._post_receives()
        # A single test may only progress the message without completing it.
        self._computes = not (self._next and any(self._next[1].Test() for _ in range(_TESTS)))
        return self._computes

    def agree(self, step: int, gradient: GlobalGradient, own: StepReport) -> Agreed:
        self._resend()
        tensors = self.workers.arena.tensors
        if self._computes:
            mine, names = self._message(self._rank), gradient.used()
            used = [tensor.name in names for tensor in tensors]
            mine.write(step, self.workers.gradients, own, used)
            self._submit(mine)
        result = self._send_mean(step) if self._is_root else self._receive(step)
        self.workers.gradients[...] = result.body
        self.taken = tuple(tuple(int(s) for s in row if s) for row in result.mask)
        norm = float(np.sqrt(gradient.own_squares()))
        pairs = zip(tensors, result.used, strict=True)
        unused = frozenset(tensor.name for tensor, used in pairs if not used)
        numbers = result.header[2:].tolist()
        return Agreed(*numbers, grad_norm=norm, own_norm=norm, unused=unused)

    def progress(self) -> None:
        if self._is_root:
            self._take_arrivals()
        else:
            self._sends = [one for one in self._sends if not one[1].Test()]

    def _post_receives(self) -> None:
        """Post the receives that this rank lacks."""
        if self._is_root:
            for worker in {*range(1, self._size)} - self._posted.keys():
                self._post_receive(worker)
        elif self._next is None:
            message = self._message(0)
            self._next = message, self._comm.Irecv(message.data, 0, _RESULT)

    def _submit(self, message: Message) -> None:
        """Hand a gradient of this worker to rank 0, without waiting."""
        if self._is_root:
            self._pending.append(message)
            return
        # Waiting for the send could deadlock: rank 0 may be waiting for this rank.
        self.progress()
        self._sends.append((message, self._comm.Isend(message.data, 0, _GRADIENT)))
        self._sent += 1
        self._count_traffic(1, message)

    def _count_traffic(self, messages: int, message: Message) -> None:
        if traffic := self._comm.traffic:
            traffic.send(messages, messages * message.data.nbytes)

    def _receive(self, step: int) -> Message:
        """The mean of a step from rank 0."""
        assert self._next is not None
        message, request = self._next
        while not request.Test():
            self.progress()
            give_way()
        assert message.step == step, "results come in order"
        self._next = None
        return message

    # -- rank 0

    def _take_arrivals(self) -> None:
        """Receive the gradients that have arrived, without waiting."""
        for worker, (message, request) in list(self._posted.items()):
            if request.Test():
                self._pending.append(message)
                self._received[worker] += 1
                self._post_receive(worker)

    def _post_receive(self, worker: int) -> None:
        message = self._message(worker)
        self._posted[worker] = message, self._comm.Irecv(message.data, worker, _GRADIENT)

    def _send_mean(self, step: int) -> Message:
        """Wait for enough gradients, and send the mean of all that are there to all ranks."""
        while sum(one.step == step for one in self._pending) < self._needed:
            self._take_arrivals()
            give_way()
        self._take_arrivals()
        taken, self._pending = self._pending, []
        result = self._result_buffer()
        mean(taken, step, result)
        requests = [
            self._comm.Issend(result.data, worker, _RESULT) for worker in range(1, self._size)
        ]
        self._results.append((result, requests))
        self._count_traffic(len(requests), result)
        return result

    def _result_buffer(self) -> Message:
        """The oldest result, for reuse, if all ranks have received it; else a new one.

        With ``behind`` results under way, it waits for the oldest.
        """
        while self._results and not MPI.Request.Testall(self._results[0][1]):
            if len(self._results) < self._behind:
                return self._message(0)
            self._take_arrivals()
            give_way()
        return self._results.popleft()[0] if self._results else self._message(0)

    # -- checkpoints

    def kept(self) -> Iterator[KeptElements]:
        """The sum of this worker's gradients that arrived late and are in no mean yet."""
        yield KeptElements("late", 0, self._late, is_per_replica=True)

    def state(self) -> Mapping[str, Array]:
        """Number of late gradients of each worker, and the step of the last one."""
        return {"quorum.late": self._late_steps}

    def quiesce(self) -> None:
        self._late[...] = 0
        self._late_steps[...] = 0
        sent = self._comm.allgather(self._sent)
        if self._is_root:
            self._post_receives()
            while (self._received[1:] < sent[1:]).any():
                self._take_arrivals()
                give_way()
            while self._results:
                MPI.Request.Waitall(self._results.popleft()[1])
            for one in self._pending:
                row = self._late_steps[one.worker]
                row[:] = row[0] + 1, one.step + 1
        while self._sends:
            self.progress()
            give_way()
        self._comm.Bcast(self._late_steps, 0)
        self._return_late()

    def _return_late(self) -> None:
        """Send late gradients from rank 0 back to their workers, which write checkpoints."""
        rows = np.zeros((self._size, self._late.size), self._late.dtype)
        for one in self._pending:
            rows[one.worker] += one.body
        self._comm.Scatter(rows if self._is_root else None, self._late, 0)

    def resumed(self, steps_done: int) -> None:
        self._pending.clear()
        self._is_resumed = True

    def _resend(self) -> None:
        """Send the late gradients of a checkpoint to rank 0 again, in the first step after it."""
        if not self._is_resumed:
            return
        self._is_resumed = False
        count, step = self._late_steps[self._rank]
        if not self._late.any() and not count:
            return
        message = self._message(self._rank)
        message.header[:2] = step - 1, max(count, 1)
        message.mask[0, 0] = step
        message.body[...] = self._late
        tensors = self.workers.arena.tensors
        message.used[...] = [self._late[one.start : one.stop].any() for one in tensors]
        self._late[...] = 0
        self._submit(message)

    def begin(self) -> None:
        self._pending.clear()

    def close(self) -> None:
        for _, request in [*self._posted.values(), *filter(None, [self._next])]:
            with suppress(MPI.Exception):
                request.Cancel()
                request.Wait()
        self._posted.clear()
        self._next = None
        self._comm.Free()
