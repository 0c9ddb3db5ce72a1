"""Means of gradients that do not wait for the slowest workers.

Rank 0 gathers the gradients of a step until enough have arrived, and sends their mean to all.  A
gradient that arrives later goes into the mean of the next open step, so that each counts once.  A
worker that begins a step after its mean was sent takes the mean and computes nothing in that step,
so that it catches up.  All workers take the same means in the same order and stay equal bit by bit.

In contrast, backup workers (Chen et al. 2016) discard late gradients.  Arrivals vary from run to
run: each step's record names the gradients in its mean, and ``replay`` takes them again.

Rank 0 is a worker, too, and forms a mean after its own gradient: all wait for a slow rank 0.
Long messages progress only while both sides are inside of MPI calls; rank 0 makes such calls
between the layers of its backward pass and at the end of a step.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.execution.waiting import give_way
from mpitrain.arrays import Array
from mpitrain.parallel.summation import Keeper, KeptElements
from mpitrain.step.agreement import Agreed, StepReport
from mpitrain.step.gradient import GlobalGradient
from mpitrain.sync.message import Late, Message, mean
from mpitrain.sync.strategy import Strategy, Taken
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

    def __init__(
        self,
        workers: Workers,
        needed: int,
        behind: int = 4,
        replay: Mapping[int, Taken] | None = None,
    ) -> None:
        """Duplicate the communicator; collective.

        Args:
            workers: the worker of this rank, and its peers.
            needed: number of its own gradients that a step waits for.
            behind: number of steps that a worker may be behind before the others wait for it.
            replay: choices of an earlier run, by steps counted from 1.
        """
        self.workers = workers
        self.reason = f"{needed} of {workers.comm.size} workers"
        self._needed, self._replay = needed, replay or {}
        rank = workers.comm.rank
        #: In a replay, the steps in which this worker computes a gradient.
        self._computed = {step for taken in self._replay.values() for step in taken[rank]}
        #: Whether this worker computes a gradient in the current step.
        self._computes = True
        self._comm: Any = workers.comm.Dup()
        self._size = workers.comm.size
        self._is_root = rank == 0
        self._behind = behind
        # On rank 0: posted receives by worker, gradients in no mean yet, results under way.
        self._posted: dict[int, tuple[Message, MPI.Request]] = {}
        self._pending: list[Late] = []
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

    def _message(self) -> Message:
        return Message(self._size, len(self.workers.arena.tensors), self.workers.gradients)

    # -- a step

    def computes(self, step: int) -> bool:
        self._post_receives()
        if step + 1 in self._replay:
            self._computes = step + 1 in self._computed
        else:
            self._computes = self._is_root or not self._has_result()
        return self._computes

    def agree(self, step: int, gradient: GlobalGradient, own: StepReport) -> Agreed:
        self._post_receives()
        self._resend()
        tensors = self.workers.arena.tensors
        if self._computes:
            mine = self._message()
            used = gradient.used()
            mine.write(
                step, self.workers.gradients, own, [tensor.name in used for tensor in tensors]
            )
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

    # -- rank 0

    def _take_arrivals(self) -> None:
        """Receive the gradients that have arrived, without waiting."""
        for worker, (message, request) in list(self._posted.items()):
            if request.Test():
                self._pending.append(Late(worker, message))
                self._received[worker] += 1
                self._post_receive(worker)

    def _post_receive(self, worker: int) -> None:
        message = self._message()
        self._posted[worker] = message, self._comm.Irecv(message.data, worker, _GRADIENT)

    def _submit(self, message: Message) -> None:
        """Hand a gradient of this worker to rank 0, without waiting."""
        if self._is_root:
            self._pending.append(Late(0, message))
            return
        # Waiting for the send could deadlock: rank 0 may be waiting for this rank.
        self.progress()
        self._sends.append((message, self._comm.Isend(message.data, 0, _GRADIENT)))
        self._sent += 1
        self._count_traffic(1, message)

    def _send_mean(self, step: int) -> Message:
        """Wait for enough gradients, and send the mean of all that are there to all ranks."""
        wanted = self._replay.get(step + 1)
        while not self._has_enough(step, wanted):
            self._take_arrivals()
            give_way()
        self._take_arrivals()
        taken = [one for one in self._pending if _is_wanted(one, wanted)]
        self._pending = [one for one in self._pending if not _is_wanted(one, wanted)]
        result = self._result_buffer()
        mean(taken, step, result, self._size)
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
                return self._message()
            self._take_arrivals()
            give_way()
        return self._results.popleft()[0] if self._results else self._message()

    def _has_enough(self, step: int, wanted: Taken | None) -> bool:
        arrived = {(one.worker, one.message.step + 1) for one in self._pending}
        if wanted is not None:
            return arrived >= {(w, s) for w, steps in enumerate(wanted) for s in steps}
        return sum(s == step + 1 for _, s in arrived) >= self._needed

    # -- other ranks

    def _count_traffic(self, messages: int, message: Message) -> None:
        if traffic := self._comm.traffic:
            traffic.send(messages, messages * message.data.nbytes)

    def _has_result(self) -> bool:
        """Whether the result of the step has arrived already."""
        assert self._next is not None
        # A single test may only progress the message without completing it.
        return any(self._next[1].Test() for _ in range(_TESTS))

    def _receive(self, step: int) -> Message:
        assert self._next is not None
        message, request = self._next
        while not request.Test():
            self.progress()
            give_way()
        assert message.step == step, "results come in order"
        self._next = None
        return message

    def _post_receives(self) -> None:
        """Post the receives that this rank lacks."""
        if self._is_root:
            for worker in range(1, self._size):
                if worker not in self._posted:
                    self._post_receive(worker)
        elif self._next is None:
            message = self._message()
            self._next = message, self._comm.Irecv(message.data, 0, _RESULT)

    # -- checkpoints

    @property
    def keepers(self) -> Sequence[Keeper]:
        return [self]

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
                row[:] = row[0] + 1, one.message.step + 1
        while self._sends:
            self.progress()
            give_way()
        self._comm.Bcast(self._late_steps, 0)
        self._return_late()

    def _return_late(self) -> None:
        """Send late gradients from rank 0 back to their workers, which write checkpoints."""
        rows = np.zeros((self._size, self._late.size), self._late.dtype)
        for one in self._pending:
            rows[one.worker] += one.message.body
        self._comm.Scatter(rows if self._is_root else None, self._late, 0)

    def resumed(self, steps_done: int) -> None:
        super().resumed(steps_done)
        self._pending.clear()
        self._is_resumed = True

    def _resend(self) -> None:
        """Send the late gradients of a checkpoint to rank 0 again, in the first step after it."""
        if not self._is_resumed:
            return
        self._is_resumed = False
        count, step = self._late_steps[self._comm.rank]
        if not self._late.any() and not count:
            return
        message = self._message()
        message.header[:2] = step - 1, max(count, 1)
        message.mask[0, 0] = step
        message.body[...] = self._late
        message.used[...] = [
            self._late[tensor.start : tensor.stop].any() for tensor in self.workers.arena.tensors
        ]
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


def _is_wanted(one: Late, wanted: Taken | None) -> bool:
    return wanted is None or one.message.step + 1 in wanted[one.worker]
