"""``auto`` by turns: native and ours in the first calls that repeat, and then what was faster.

A table is measured on another day, or on another machine.  With ``turns=True`` the first eight
blocking calls of a kind, and the first eight runs of a persistent plan, are the MPI library's own
collective and one of ours in turn, on the program's own data; blocking calls each begin with a
barrier.  Then the ranks take the largest of their times of each call, so all have the same numbers,
and all keep the algorithm whose median is less.

Rank 0 of the communicator writes it down (:mod:`collectives.calls.remembered`), and looks there
when a kind of call comes for the first time; it tells the others, whose own files play no part.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from collectives.calls.call import Call
from collectives.calls.library import library
from collectives.calls.native import can_be_native, fault_of_native
from collectives.calls.remembered import Kept, Kind, recall, remember
from collectives.calls.resources import Resources
from collectives.calls.tuner import Choice

Seconds = npt.NDArray[np.float64]

log = logging.getLogger("collectives")

#: Smaller calls are not worth it: a table is right about them, or it does not matter.
TURNS_BYTES = 64 << 10
#: Whose turn it is, in this order; the first two warm up.
ORDER = ("native", "ours", "native", "ours", "ours", "native", "native", "ours")
_WARM_UP = 2
#: After so many calls the ranks look at their times; the first time, only what takes so many times
#: as long as the other is left at that.
DECISIONS = (4, len(ORDER))
_HOPELESS = 4.0


@dataclass
class Trial:
    """One kind of call.

    Attributes:
        ours: the algorithm that takes turns with native.
        seconds: that the calls took so far.
        kept: what all calls get from now on, once it is known.
    """

    kind: Kind
    ours: str
    seconds: list[float] = field(default_factory=list)
    kept: Choice | None = None

    @property
    def turn(self) -> Choice:
        """The algorithm of the next call, and why."""
        if self.kept is not None:
            return self.kept
        number = len(self.seconds)
        name = "native" if ORDER[number % len(ORDER)] == "native" else self.ours
        return Choice(name, f"by turns: call {min(number + 1, len(ORDER))} of {len(ORDER)}")


def verdict(seconds: Seconds) -> tuple[str, float] | None:
    """``native`` or ``ours``, and native's time over ours; ``None``: it takes more calls.

    Args:
        seconds: of each call so far, of the slowest rank.
    """
    medians = []
    for name in ("native", "ours"):
        own = [t for t, turn in zip(seconds, ORDER) if turn == name]
        medians.append(float(np.median(own[_WARM_UP // 2 :])))
    ratio = medians[0] / max(medians[1], 1e-9)
    if len(seconds) < len(ORDER) and 1 / _HOPELESS < ratio < _HOPELESS:
        return None
    return ("ours" if ratio > 1 else "native"), ratio


class Turns:
    """The trials of one communicator; its methods are called by all ranks in the same order.

    Args:
        wait: for a request, while plans that are under way move along.
    """

    def __init__(self, resources: Resources, wait: Callable[[MPI.Request], None]) -> None:
        self._resources = resources
        self._wait = wait
        self._trials: dict[Kind, Trial] = {}

    def of(self, call: Call, memory: str, ours: Callable[[], Choice]) -> Trial | None:
        """The trial that a call belongs to; ``None`` if there is nothing to try.

        Args:
            memory: where the buffers lie, as all ranks know.
            ours: the best guess at one of our algorithms.
        """
        kind = self._kind(call, memory)
        if kind is None:
            return None
        trial = self._trials.get(kind)
        if trial is None:
            trial = self._trials[kind] = Trial(kind, ours().algorithm)
            trial.kept = self._remembered(trial)
        return trial

    def known(self, call: Call, memory: str) -> Choice | None:
        """What was decided before of such calls; sends no message."""
        kind = self._kind(call, memory)
        trial = self._trials.get(kind) if kind is not None else None
        return trial.kept if trial is not None else None

    def _kind(self, call: Call, memory: str) -> Kind | None:
        """``None`` if there is nothing to try."""
        if not self._is_worth_it(call):
            return None
        settings, comm = self._resources.settings, self._resources.comm
        if settings.reproducible and call.contract.reduces:
            return None  # another algorithm, other bits
        return Kind(
            library(),
            call.collective,
            memory,
            str(call.buffer.items.dtype) if call.contract.reduces else "",
            call.nbytes.bit_length() - 1,
            comm.size,
            self._resources.ranks_per_node,
        )

    def _is_worth_it(self, call: Call) -> bool:
        """The same on all ranks."""
        settings = self._resources.settings
        if not settings.turns or settings.needs_messages or call.algorithm != "auto":
            return False
        if call.counts is not None or call.is_on_device or call.nbytes < TURNS_BYTES:
            return False
        if call.op is not None and not call.op.is_predefined:
            return False
        able = can_be_native(call) and not fault_of_native(call, planned=False)
        return able and call.member.size > 1 and call.collective != "barrier"

    def begin(self) -> float:
        """A call of a trial begins on all ranks; the time."""
        self._wait(self._resources.channel.Ibarrier())
        return perf_counter()

    def end(self, trial: Trial, begun: float) -> None:
        """It has ended: when all have had their turns, the ranks decide."""
        trial.seconds.append(perf_counter() - begun)
        if len(trial.seconds) in DECISIONS:
            times = np.array(trial.seconds)
            self._wait(self._resources.channel.Iallreduce(MPI.IN_PLACE, times, MPI.MAX))
            if decided := verdict(times):
                self.keep(trial, *decided)

    def keep(self, trial: Trial, name: str, ratio: float) -> None:
        """The ranks have decided."""
        algorithm = trial.ours if name == "ours" else "native"
        told = f"by turns: {trial.ours} {ratio:.2f}x native"
        trial.kept = Choice(algorithm, told)
        log.info("%s: %s (%s)", trial.kind, algorithm, told)
        if self._resources.comm.rank == 0:
            remember(Kept(trial.kind, trial.ours, algorithm, float(f"{ratio:.3g}")))

    def _remembered(self, trial: Trial) -> Choice | None:
        """What rank 0 finds in its file: the same on all ranks."""
        channel = self._resources.channel
        told = np.zeros(1)
        if channel.rank == 0:
            found = recall(trial.kind)
            if found is not None and found.ours == trial.ours:
                told[0] = found.ratio if found.algorithm == trial.ours else -found.ratio
        self._wait(channel.Ibcast(told, 0))
        if not told[0]:
            return None
        algorithm = trial.ours if told[0] > 0 else "native"
        reason = f"by turns, remembered: {trial.ours} {abs(told[0]):.2f}x native"
        log.info("%s: %s (%s)", trial.kind, algorithm, reason)
        return Choice(algorithm, reason)
