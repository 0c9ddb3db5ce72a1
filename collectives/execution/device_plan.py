"""Plans whose work is queued on a stream of their own, and the gates that MPI waits behind.

In the order of streams that PyTorch's process groups have: what a plan does comes after what the
caller's stream had queued at the start, and what the caller's stream does after ``Wait`` comes
after the plan.  The host waits for neither.  Where a message is due, though, MPI must not see
memory before the stream has come that far, and MPI is called by the host: a :class:`Gate`, which
is a round of its own, tells when it has.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from collectives.execution.plan import Binding, BoundRound, Plan
from collectives.execution.transport.cuda_memory import CudaMemory
from collectives.execution.transport.device import StagedSend
from collectives.execution.waiting import Polled


class Gate(Polled):
    """A request that is complete once all has been done that was queued before its start."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def Start(self) -> None:
        self.event.record()

    def Test(self) -> bool:
        return self.event.done


class EndGate(Gate):
    """The gate at the end of a plan: streams wait for it, and the host does not."""

    def __init__(self, event: Any) -> None:
        super().__init__(event)
        self.callers: Sequence[Any] = ()

    def Wait(self) -> None:
        for stream in self.callers:
            stream.wait_event(self.event)


class OpeningGate(Gate):
    """The gate at the beginning of a plan, which follows what its callers had queued.

    The own stream waits for them at once where nobody else has more to queue there.  Another plan
    that is under way has: its next rounds would be behind that wait.  Then the host asks until the
    callers have come that far, and only then this plan queues anything.

    Attributes:
        events: behind what each of the caller's streams had queued.
    """

    def __init__(self, memory: CudaMemory, is_alone: Callable[[], bool]) -> None:
        self.events: list[Any] = []
        self._memory = memory
        self._is_alone = is_alone

    def Start(self) -> None:
        callers = self._memory.callers()
        while len(self.events) < len(callers):
            self.events.append(self._memory.event())
        del self.events[len(callers) :]
        self._memory.mark(callers, self.events)

    def Test(self) -> bool:
        return self._is_alone() or all(event.done for event in self.events)

    def pass_through(self) -> None:
        """Puts what the plan queues next behind the callers' work."""
        self._memory.follow(self.events)


def behind(gate: Gate, bound: BoundRound) -> list[BoundRound]:
    """``bound``, and the gate behind it: the next round finds all done that was queued before."""
    bound.reductions.append(gate.Start)
    return [bound, BoundRound(requests=[gate])]


def gated(bound: list[BoundRound], memory: CudaMemory) -> list[BoundRound]:
    """Puts a gate before each round with messages: before it, the stream has not written what MPI
    sends, and may still use what MPI receives into."""
    gate, rounds = Gate(memory.event()), []
    for each in bound:
        if each.requests:
            copies = [r.prepare for r in each.requests if isinstance(r, StagedSend)]
            rounds += behind(gate, BoundRound(starts=[*copies]))
        rounds.append(each)
    return rounds


def _all_done(testall: Callable[[Sequence[Any]], bool], requests: Sequence[Any]) -> bool:
    first = requests[0]  # a gate is alone in its round
    return first.Test() if isinstance(first, Gate) else testall(requests)


class DevicePlan(Plan):
    """A plan on memory of a device.

    ``Start`` and ``Wait`` put it into the order of the streams that are current when they are
    called; what the caller queues then finds the results.  ``Test`` is true once they are there,
    for every stream and for the host; so is the end of :meth:`synchronize`.  Until one of these,
    the plan keeps the memory that it works on: who frees it later frees it behind the plan.  Its
    work is queued in the binding's memory.
    """

    def __init__(
        self,
        collective: str,
        algorithm: str,
        nbytes: int,
        rounds: list[BoundRound],
        testall: Callable[[Sequence[Any]], bool],
        binding: Binding,
    ) -> None:
        self._memory = memory = cast(CudaMemory, binding.memory)
        self._begin = OpeningGate(memory, self._is_alone)
        self._end = EndGate(memory.event())
        begin = BoundRound([self._begin.Start], [self._begin], [], [self._begin.pass_through])
        end = BoundRound(starts=[self._end.Start], requests=[self._end], finish=[self._end.Wait])
        #: A plan that is queued as a whole holds nobody up, and stays in the order of the starts.
        self._has_gates = any(isinstance(r, Gate) for bound in rounds for r in bound.requests)
        testall = partial(_all_done, testall)
        super().__init__(collective, algorithm, nbytes, [begin, *rounds, end], testall, binding)

    @property
    def is_only_queued(self) -> bool:
        """Whether its messages are over, and only the streams have not come to its end, so that
        ``Wait`` does not make the host wait."""
        return self._next >= len(self.rounds) - 1

    def __call__(self) -> None:
        self.Start()
        self.Wait()

    def Start(self) -> None:
        self._progress.expect_whole()
        super().Start()
        if not self._is_alone():
            return
        try:
            with self._memory.working():
                self._begin.pass_through()
                self._next = 1
                self._start_round()
        except BaseException as error:
            self._leave(error, 1)
            raise

    def _is_alone(self) -> bool:
        """Whether no other plan has more to queue on the stream, or this one must not wait."""
        others = (plan for plan in self._progress.plans if plan is not self)
        return not self._has_gates or not any(
            isinstance(plan, DevicePlan) and not plan.is_only_queued for plan in others
        )

    def Test(self) -> bool:
        with self._memory.working():
            return super().Test()

    def Wait(self, status: object = None) -> None:
        if self._broken:
            self._progress.expect_whole()
        self._end.callers = self._memory.callers()
        self._progress.adopt(self)
        try:
            with self._memory.working():
                # Gates are asked, never waited for: meanwhile the rank moves along what it has
                # under way.  Not the end, which the caller's streams wait for.
                while not self.is_only_queued and not super().Test():
                    self._progress.advance()
                self._finish()
        except BaseException as error:
            self._leave(error, self._next)
            raise
        finally:
            self._end.callers = ()

    def synchronize(self) -> None:
        self.Wait()
        # NCCL's work ends only with other ranks, which may wait for a message of ours.
        while self._progress.here and not self._end.event.done:
            self._progress.advance()
        self._end.event.synchronize()
