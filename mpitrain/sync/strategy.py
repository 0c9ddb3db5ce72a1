"""What the trainer asks of a way to synchronise, and the usual one."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

from mpitrain.arrays import Array
from mpitrain.parallel.store import Sink
from mpitrain.parallel.summation import Keeper
from mpitrain.step.agreement import Agreed, Told
from mpitrain.step.gradient import GlobalGradient

#: For each worker the steps, counted from 1, whose gradients are in a mean.
Taken = tuple[tuple[int, ...], ...]


class Progressing:
    """A store that moves what a strategy has under way along with its own sums."""

    def __init__(self, store: Sink, strategy: "Strategy") -> None:
        self._strategy, self._progress = strategy, store.progress
        self.accumulate = store.accumulate
        self.ready = store.ready

    def progress(self) -> None:
        """Move both along."""
        self._progress()
        self._strategy.progress()


class Strategy(Protocol):
    """When the workers talk, and about what.

    A step is: the worker's gradients; :meth:`agree`; the update, unless the step is skipped;
    :meth:`after_step`.  Steps are counted from 0.  What is collective is so over all ranks.

    Attributes:
        drifts: workers have weights of their own between exchanges.
        algorithm, reason: how the workers' numbers are summed, and why so; empty: the store says.
        exchanges: that took effect since the beginning.
        since: steps since the last one.
        strayed: see :class:`~mpitrain.step.agreement.Told`.
    """

    exchanges: int
    since: int
    strayed: tuple[float, float]

    @property
    def drifts(self) -> bool: ...

    @property
    def keepers(self) -> Sequence[Keeper]:
        """What keeps something from step to step besides the arrays below."""

    @property
    def taken(self) -> Taken:
        """What is in the sum of the last step, if not all gradients are."""

    @property
    def algorithm(self) -> str: ...

    @property
    def reason(self) -> str: ...

    def computes(self, step: int) -> bool:
        """Whether this rank is to compute gradients in the step, and not only to follow."""

    def agree(self, step: int, gradient: GlobalGradient, own: Told) -> Agreed:
        """Complete the gradients that the update takes, and tell of the step; collective."""

    def after_step(self, step: int) -> float:
        """The step is done, or skipped; returns seconds spent in communication."""

    def progress(self) -> None:
        """Move along what is under way, without waiting."""

    def quiesce(self) -> None:
        """Complete what is under way, which takes effect when it is due; collective."""

    def consensus(self) -> Array | None:
        """The weights of all workers together, the same bits on all, shape (arena.size,).

        None: all workers have the same.  Collective.
        """

    def mean(self, flat: Array) -> Array:
        """The mean over the workers of flat arrays, the same bits on all; collective."""

    def drain(self) -> None:
        """All workers take the consensus, and nothing is under way; collective."""

    def shared(self) -> Mapping[str, Array]:
        """What all workers have the same, by name; flat, in the arena's layout."""

    def arrived(self) -> Mapping[str, Array]:
        """What they have the same after :meth:`quiesce`."""

    def own(self) -> Mapping[str, Array]:
        """What this worker alone has besides weights and the optimiser's state."""

    def resumed(self, steps_done: int) -> None:
        """The arrays of the three methods above were filled in, as after so many steps."""

    def begin(self) -> None:
        """The weights were replaced, the same on all workers; nothing is under way."""

    def close(self) -> None:
        """Free what is bound to communicators; collective."""


class InStep:
    """Of a strategy whose workers have the same weights after each step: there is no mean of them
    to take, and nothing that only some have."""

    drifts: ClassVar[bool] = False
    strayed = (0.0, 0.0)

    def consensus(self) -> Array | None:
        return None

    def mean(self, flat: Array) -> Array:
        return flat

    def drain(self) -> None:
        pass

    def shared(self) -> Mapping[str, Array]:
        return {}

    def arrived(self) -> Mapping[str, Array]:
        return {}

    def own(self) -> Mapping[str, Array]:
        return {}


class EveryStep(InStep):
    """The workers sum the gradients of each step: the store does, and nothing is left to do."""

    algorithm = reason = ""
    exchanges = 0
    since = 0
    keepers: Sequence[Keeper] = ()
    taken: Taken = ()

    def computes(self, step: int) -> bool:
        return True

    def agree(self, step: int, gradient: GlobalGradient, own: Told) -> Agreed:
        return gradient.agree(own)

    def after_step(self, step: int) -> float:
        self.exchanges += 1
        return 0.0

    def progress(self) -> None:
        pass

    def quiesce(self) -> None:
        pass

    def resumed(self, steps_done: int) -> None:
        self.exchanges = steps_done

    def begin(self) -> None:
        pass

    def close(self) -> None:
        pass
