"""When the workers of a job synchronise, and the usual answer: in every step."""

from collections.abc import Mapping, Sequence

from mpitrain.arrays import Array
from mpitrain.parallel.store import Sink
from mpitrain.parallel.summation import Keeper
from mpitrain.step.agreement import Agreed, Told
from mpitrain.step.gradient import GlobalGradient

#: For each worker the steps, counted from 1, whose gradients are in a mean.
Taken = tuple[tuple[int, ...], ...]


class Strategy:
    """Sums the gradients of each step: the store does, and nothing is left to do.

    A step is: the worker's gradients; :meth:`agree`; the update, unless the step is skipped;
    :meth:`after_step`.  Steps are counted from 0.  All methods but :meth:`computes`,
    :meth:`progress`, and those that return arrays are collective over all ranks.

    Other strategies override what differs: Local SGD and delayed averaging synchronise in
    :meth:`after_step`, a quorum in :meth:`agree`.

    Attributes:
        drifts: workers have weights of their own between exchanges.
        algorithm: algorithm that sums the workers' numbers; empty: that of the store.
        reason: why this algorithm was chosen.
        exchanges: exchanges that took effect since the beginning.
        since: steps since the last exchange.
        strayed: see :class:`~mpitrain.step.agreement.Told`.
        taken: gradients in the sum of the last step, if some are missing.
        keepers: objects that keep something from step to step besides the arrays below.
    """

    drifts = False
    algorithm = ""
    reason = ""
    exchanges = 0
    since = 0
    strayed = (0.0, 0.0)
    taken: Taken = ()

    @property
    def keepers(self) -> Sequence[Keeper]:
        return ()

    def computes(self, step: int) -> bool:
        """Whether this rank computes gradients in the step; else it only follows."""
        return True

    def agree(self, step: int, gradient: GlobalGradient, own: Told) -> Agreed:
        """Complete the gradients that the update takes, and report the step."""
        return gradient.agree(own)

    def after_step(self, step: int) -> float:
        """Synchronise after a step, taken or skipped; seconds of communication."""
        self.exchanges += 1
        return 0.0

    def progress(self) -> None:
        """Move along what is under way, without waiting."""

    def quiesce(self) -> None:
        """Complete what is under way, which takes effect when it is due."""

    def consensus(self) -> Array | None:
        """Weights of all workers together, the same bits on all, shape (arena.size,).

        ``None``: all workers have the same.
        """
        return None

    def mean(self, flat: Array) -> Array:
        """Mean over the workers of flat arrays, the same bits on all."""
        return flat

    def drain(self) -> None:
        """Give all workers the consensus; nothing is under way then."""

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
        self.exchanges = steps_done

    def begin(self) -> None:
        """Begin anew: the weights were replaced, the same on all workers."""

    def close(self) -> None:
        """Free what is bound to communicators."""


class Progressing:
    """A store that moves a strategy's exchanges along with its own sums."""

    def __init__(self, store: Sink, strategy: Strategy) -> None:
        self._strategy, self._progress = strategy, store.progress
        self.accumulate = store.accumulate
        self.ready = store.ready

    def progress(self) -> None:
        """Move both along."""
        self._progress()
        self._strategy.progress()
