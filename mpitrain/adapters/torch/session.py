"""Acts of replicas of a module: meetings, sums that end with them, and errors of all ranks."""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch

from collectives import Communicator
from collectives.failure.abort import note_shared
from mpitrain.adapters.torch.buckets import GradientBuckets
from mpitrain.adapters.torch.comm_hooks import HookErrors, HookFailed
from mpitrain.adapters.torch.rendezvous import (
    AVERAGE,
    BEGIN,
    GIVE_UP,
    Meeting,
    Parted,
    Refused,
    Rendezvous,
)

#: Next number of a module; modules that share ranks have different ones, alike on all their ranks.
_next_number = 0


class BackwardPass:
    """Autograd calls it when a backward pass has ended well, and drops it when one has raised.

    Only autograd keeps it alive, so that a weak reference shows how the pass ended.

    Attributes:
        over: whether the pass has ended.
    """

    def __init__(self) -> None:
        self._ends: list[tuple[int, Callable[[], None]]] = []
        self.over = False

    def __call__(self) -> None:
        self.over = True
        # The order of autograd may differ between ranks.
        for _, end in sorted(self._ends, key=lambda entry: entry[0]):
            end()

    @classmethod
    def join(cls, number: int, end: Callable[[], None]) -> "weakref.ref[BackwardPass]":
        """Call ``end`` at the end of this thread's backward pass; call it from a hook of autograd.

        ``number`` orders the calls, alike on all ranks.
        """
        found = _latest.reference() if _latest.reference else None
        if found is None or found.over:
            found = cls()
            torch.autograd.Variable._execution_engine.queue_callback(found)
            _latest.reference = weakref.ref(found)
        found._ends.append((number, end))
        return weakref.ref(found)


class _Latest(threading.local):
    reference: weakref.ref[BackwardPass] | None = None


_latest = _Latest()


def is_alive(reference: weakref.ref[BackwardPass] | None) -> bool:
    """Whether a backward pass is under way."""
    found = reference() if reference else None
    return found is not None and not found.over


@dataclass
class GradientState:
    """State of the gradients since the last mean.

    Attributes:
        pending: whether there may be gradients that are no means yet.
        verified: whether the ranks have compared their modules before the forward pass.
        unsummed: whether a pass in ``no_sync`` has left gradients.
        onto_mean: whether a pass has added to a mean, while ranks may run out of batches.
        weight: this rank's weight in the next mean; None: all ranks have the same.
    """

    pending: bool = False
    verified: bool = False
    unsummed: bool = False
    onto_mean: bool = False
    weight: float | None = None


@dataclass
class Join:
    """How ranks go on that have no batch left, while others have.

    Attributes:
        divide_by_initial_world_size: whether they count in the means, with gradients of 0.
        throw_on_early_termination: whether they end all ranks with an error.
        following: number of objects that take over the state of the rank that ended last.
        absent: whether this rank has no batch left.
    """

    divide_by_initial_world_size: bool
    throw_on_early_termination: bool
    following: int
    absent: bool = False


class Session:
    """Meetings of the replicas of a module, at each of which all sums that were started end.

    Attributes:
        state: state of the gradients since the last mean.
        join: state of a block in which ranks may run out of batches; None outside of one.
        buckets: buckets of the gradients.
    """

    def __init__(self, comm: Communicator) -> None:
        """Agree on a number, and duplicate the communicator; collective."""
        self._meetings = Rendezvous(comm, lambda: self.buckets.test())
        self._words = self._meetings.comm
        self._errors = HookErrors(self._meetings)
        self.buckets = GradientBuckets(comm, self._errors)
        self._pass: weakref.ref[BackwardPass] | None = None
        self.state = GradientState()
        self.join: Join | None = None
        self._ended = ""
        self._meetings.number = _agree_on_number(lambda n: int(self._meet(BEGIN, n).numbers[0]))
        # Gradients and meetings have communicators of their own, so that ranks that wait for other
        # gradients still meet.
        self.buckets = GradientBuckets(comm.Dup(), self._errors)
        self.buckets.comm.watch()

    def _release(self) -> None:
        self._ended = "it was closed"
        self.buckets.unbind()
        self.buckets.comm.Free()

    @property
    def _weight(self) -> float | None:
        """This rank's weight in the mean."""
        return 0.0 if self.join and self.join.absent else self.state.weight

    def _settle(self) -> None:
        """After a backward pass that raised: receive what other ranks sent, and forget it."""
        if self._ended:
            raise RuntimeError(f"this DataParallel cannot be used any more: {self._ended}")
        if self._pass is not None and not is_alive(self._pass):
            self._pass = None
            self.buckets.start(self._weight, complete=False)
            self._meet(GIVE_UP)
            self.state.weight = None

    def _meet(self, doing: str, a: int = 0, b: int = 0, c: int = 0, fault: str = "") -> Meeting:
        """Meet the other ranks, and complete all sums that were started."""
        final = self._errors.own is not None
        fault = self._errors.fault or fault
        try:
            with self.buckets.comm.waiting("allreduce of the replicas of a module"):
                agreed = self._meetings.meet(doing, (a, b, c), fault, final=final)
        except Parted as error:
            self._ended = str(error)
            note_shared(self._words, error)
            raise
        except Refused as error:
            note_shared(self._words, error)
            if error.final:
                self._give_up()
            self._complete(error.doing)
            self.state.weight = None
            raise
        self._complete(agreed.doing)
        return agreed

    def _complete(self, doing: str) -> None:
        if self.join and self.join.absent and doing in (AVERAGE, GIVE_UP):
            self.buckets.start(self._weight, complete=False)  # as all others have done before
        if self.buckets.finish():
            self._give_up()

    def _give_up(self) -> NoReturn:
        """Raise on all ranks, after hooks of some have failed."""
        self._ended = self._errors.of_all_ranks()
        raise self._errors.own or HookFailed(self._ended)


def _agree_on_number(most: Callable[[int], int]) -> int:
    """A new number for a module; ``most`` gives the largest value over the ranks."""
    global _next_number
    number = most(_next_number)
    _next_number = number + 1
    return number
