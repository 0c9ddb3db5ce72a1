"""Strategies by which the workers of a job synchronise; the base class does so in every step."""

from collections.abc import Mapping, Sequence

from mpitrain.arrays import Array
from mpitrain.parallel.summation import Keeper
from mpitrain.step.agreement import Agreed, StepReport
from mpitrain.step.gradient import GlobalGradient

#: For each worker the steps, counted from 1, whose gradients are in a mean.
Taken = tuple[tuple[int, ...], ...]


class Strategy:
    """Synchronises in every step: the store sums the gradients, and nothing else is needed.

    In a step, the worker computes its gradients and calls :meth:`agree`, updates its weights unless
    the step is skipped, and calls :meth:`after_step`.  Steps are counted from 0.  All methods are
    collective over all ranks except :meth:`computes`, :meth:`progress`, and those that return
    arrays.

    Other strategies override what differs: Local SGD and delayed averaging synchronise in
    :meth:`after_step`, a quorum in :meth:`agree`.

    Attributes:
        algorithm: algorithm that sums the workers' numbers; empty: the store's algorithm.
        reason: why this algorithm was chosen.
        strayed: distance from the anchor; see :class:`~mpitrain.step.agreement.StepReport`.
        taken: steps of each worker in the last mean; empty: every step has all gradients.
        keepers: objects that keep other state from step to step than the arrays below.
    """

    algorithm = ""
    reason = ""
    strayed = (0.0, 0.0)
    taken: Taken = ()
    keepers: Sequence[Keeper] = ()

    def computes(self, step: int) -> bool:
        """Whether this rank computes gradients in the step; else it only follows."""
        return True

    def agree(self, step: int, gradient: GlobalGradient, own: StepReport) -> Agreed:
        """Complete the gradients that the update takes, and report the step."""
        return gradient.agree(own)

    def after_step(self, step: int) -> None:
        """Synchronise after a step, taken or skipped."""

    def progress(self) -> None:
        """Progress the exchanges that are under way, without waiting."""

    def quiesce(self) -> None:
        """Complete the exchanges that are under way; they still take effect when due."""

    def consensus(self) -> Array | None:
        """Average weights of the workers, the same bits on all, shape (arena.size,).

        ``None``: all workers have the same weights.
        """
        return None

    def mean(self, flat: Array) -> Array:
        """Mean over the workers of flat arrays, the same bits on all."""
        return flat

    def drain(self) -> None:
        """Give all workers the consensus; no exchange is under way afterwards."""

    def shared(self) -> Mapping[str, Array]:
        """Arrays that all workers have the same, by name; flat, in the arena's layout."""
        return {}

    def arrived(self) -> Mapping[str, Array]:
        """Arrays that all workers have the same after :meth:`quiesce`."""
        return {}

    def own(self) -> Mapping[str, Array]:
        """Arrays of this worker alone, besides weights and the optimiser's state."""
        return {}

    def resumed(self, steps_done: int) -> None:
        """Go on after ``steps_done`` steps; the arrays above were filled in."""

    def begin(self) -> None:
        """Begin anew: the weights were replaced, the same on all workers."""

    def close(self) -> None:
        """Free communicators and requests."""
