"""A persistent plan by turns: native's and ours, until the ranks know which is faster."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.calls.autotune import DECISIONS, ORDER, Trial, verdict
from collectives.calls.native import NativePlan
from collectives.execution.plan import Plan


class AlternatingPlan:
    """A :class:`~collectives.execution.plan.Plan` to its user.

    Runs take turns between two plans on the same buffers.  ``Start`` never waits for another rank,
    so the ranks tell one another their times in a message that the run's ``Wait`` completes; from
    the next run on, the better plan is alone.

    Args:
        native, ours: the two plans.
        trial: of this plan alone.
        channel: for the times.
        complete: waits for them, while other plans move along.
        keep: told what was decided: algorithm and native's time over ours.
    """

    def __init__(
        self,
        native: NativePlan,
        ours: Plan,
        trial: Trial,
        channel: MPI.Intracomm,
        complete: Callable[[MPI.Request], None],
        keep: Callable[[Trial, str, float], None],
    ) -> None:
        self._plans: dict[str, Plan | NativePlan] = {"native": native, "ours": ours}
        self._trial = trial
        self._channel = channel
        self._complete = complete
        self._keep = keep
        self._now: Plan | NativePlan = native
        self._begun = 0.0
        self._runs = False
        self._times = np.empty(0)
        self._request: MPI.Request = MPI.REQUEST_NULL
        self.nbytes = ours.nbytes

    @property
    def algorithm(self) -> str:
        """Of the last run, or of all from now on."""
        return self._now.algorithm

    @property
    def reason(self) -> str:
        """Why that."""
        return self._trial.turn.reason

    @property
    def collective(self) -> str:
        return self._now.collective

    def Start(self) -> None:
        """Starts it, by the algorithm whose turn it is.

        Raises:
            RuntimeError: it was freed, or is under way.
        """
        trial = self._trial
        if trial.kept is None and not self._runs:
            self._now = self._plans[ORDER[len(trial.seconds) % len(ORDER)]]
        begun = perf_counter()
        self._now.Start()
        self._begun, self._runs = begun, True
        if trial.kept is None and len(trial.seconds) in DECISIONS:
            self._times = np.array(trial.seconds)
            self._request = self._channel.Iallreduce(MPI.IN_PLACE, self._times, MPI.MAX)

    def __call__(self) -> None:
        """Runs the collective to its end."""
        self.Start()
        self.Wait()

    def Test(self) -> bool:
        """Makes progress; returns whether it has completed."""
        if not self._runs:
            return self._now.Test()
        done = self._now.Test()
        if not done or not self._request.Test():
            return False
        self._end()
        return True

    def Wait(self) -> None:
        """Completes it."""
        self._now.Wait()
        if self._runs:
            self._complete(self._request)  # all ranks have started this run, and sent their times
            self._end()

    def _end(self) -> None:
        self._runs = False
        trial = self._trial
        if trial.kept is None:
            decided = self._times.size and verdict(self._times)
            self._times = np.empty(0)
            if decided:
                name, ratio = decided
                self._keep(trial, name, ratio)
                self._now = self._plans.pop("native" if name == "native" else "ours")
                for plan in self._plans.values():
                    plan.Free()
                self._plans = {"": self._now}
            else:
                trial.seconds.append(perf_counter() - self._begun)

    def Free(self) -> None:
        """Releases both plans.

        Raises:
            RuntimeError: it is under way.
        """
        self._now.Free()
        for plan in self._plans.values():
            if plan is not self._now:
                plan.Free()

    def __repr__(self) -> str:
        return f"<AlternatingPlan: {self.collective} by {self.algorithm} of {self.nbytes} bytes>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._now, name)
