"""Local SGD, post-local SGD, DiLoCo and its streaming form.

Each worker trains by itself for ``period`` steps.  Then the workers average their outer gradients
``anchor - weights``, and an outer optimiser moves the anchor by the mean (Stich 2019; Lin et al.
2020; Douillard et al. 2023).  In the streaming form, fragments of the model take turns, and the
mean takes effect ``delay`` steps after it was started (Douillard et al. 2025).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mpitrain.arrays import Array
from mpitrain.step.update import AVERAGE
from mpitrain.sync.anchored import Anchored
from mpitrain.sync.exchange import Exchange, Selection
from mpitrain.sync.outer import Outer, Plain, velocity
from mpitrain.sync.workers import Workers


@dataclass
class Fragment:
    """Tensors that are exchanged together.

    Attributes:
        exchange: mean of the workers' outer gradients.
        offset: the exchange starts after each step whose number modulo the period is this.
        is_launched: whether the exchange is under way, or complete and not due yet.
    """

    exchange: Exchange
    offset: int
    is_launched: bool = False


class Local(Anchored):
    """The workers average their outer gradients, fragment by fragment.

    Cost of a period: an all-reduce of the parameters, and of the optimiser's state if that is
    averaged, too.  Memory, in arrays as large as the parameters, in addition to
    :class:`~mpitrain.sync.anchored.Anchored`: one, one for an outer velocity, one with a delay.

    Attributes:
        fragments: fragments of the model.
    """

    def __init__(
        self,
        workers: Workers,
        *,
        period: int,
        outer: Outer,
        start: int = 0,
        fragments: int = 1,
        delay: int = 0,
        mix: float = 0.0,
        averages_state: bool = False,
    ) -> None:
        """Set up the exchanges; collective.

        Args:
            workers: this rank's worker, and its peers in the others.
            period: steps from one exchange of a fragment to the next.
            outer: outer optimiser, which moves the anchor.
            start: number of first steps, in which the workers average their gradients.
            fragments: number of fragments; at most ``period`` and the model's number of layers.
            delay: steps until an exchange takes effect; less than ``period``.
            mix: with a delay, fraction of its own weights that a worker keeps at an exchange.
            averages_state: average the optimiser's state, too; for one fragment without delay.
        """
        super().__init__(workers, start)
        self._period, self._delay, self._outer = period, delay, outer
        self._mix = mix if delay else 0.0
        self._averages_state = averages_state
        self._velocity = velocity(outer, workers.parameters)
        #: For checkpoints: means that have arrived and are not due yet.
        self._landed = np.zeros_like(workers.parameters if delay else workers.parameters[:0])
        self.fragments = [
            Fragment(
                Exchange(
                    workers.comm,
                    Selection(tensors),
                    workers.summation(),
                    workers.parameters,
                    workers.never_used,
                ),
                (number + 1) * period // fragments % period,
            )
            for number, tensors in enumerate(workers.fragments(fragments))
        ]
        largest = self._largest()
        self.algorithm, self.reason = largest.algorithm, largest.reason

    def _exchanges(self) -> Sequence[Exchange]:
        return [fragment.exchange for fragment in self.fragments]

    def begin(self) -> None:
        super().begin()
        for fragment in self.fragments:
            fragment.is_launched = False

    def _starting(self, done: int) -> list[Fragment]:
        """The fragments whose exchange starts after ``done`` steps."""
        return [f for f in self.fragments if done > 0 and done % self._period == f.offset]

    def _takes_effect(self, done: int) -> bool:
        return bool(self._starting(done - self._delay))

    def _after(self, done: int) -> None:
        starting = self._starting(done)
        if self.keeps_all and isinstance(self._outer, Plain) and not self._mix:
            for fragment in starting:  # in floating point x - (x - w) is not w
                chosen = fragment.exchange.chosen
                chosen.put(chosen.take(self.workers.parameters), self.anchor)
            return
        if starting:
            self._look()
        if self._delay:
            self._land(self._starting(done - self._delay))
        for fragment in starting:
            self._launch(fragment, done)
        if not self._delay:
            self._land(starting)

    def _launch(self, fragment: Fragment, done: int) -> None:
        """Start the mean of the outer gradients ``anchor - weights``."""
        exchange = fragment.exchange
        for run in exchange.chosen.runs:
            part = slice(run.start, run.stop)
            into = exchange.values[run.at : run.at + run.stop - run.start]
            np.subtract(self.anchor[part], self.workers.parameters[part], out=into)
        exchange.start(self._start + done - 1)
        fragment.is_launched = True

    def _land(self, fragments: Iterable[Fragment]) -> None:
        """Move the fragments' anchors by the means, and set the worker's weights to the anchors."""
        for fragment in fragments:
            if not fragment.is_launched:
                continue  # the weights were replaced meanwhile
            exchange, chosen = fragment.exchange, fragment.exchange.chosen
            self._wait(exchange)
            anchor = chosen.take(self.anchor)
            velocity = chosen.take(self._velocity) if self._velocity.size else self._velocity
            self._outer.step(anchor, exchange.values, velocity)
            if self._velocity.size:
                chosen.put(velocity, self._velocity)
            chosen.put(anchor, self.anchor)
            if self._mix:
                # Unlike a weighted sum, this keeps the bits of elements that nobody has moved.
                own = chosen.take(self.workers.parameters)
                anchor += self._mix * (own - anchor)
            chosen.put(anchor, self.workers.parameters)
            fragment.is_launched = False
            if self._averages_state:
                self._average_state()

    def _average_state(self) -> None:
        for name in self.workers.state[0] if self.workers.state else ():
            if name != AVERAGE:  # the moving average follows the weights, not the gradients
                self.workers.put_slot(name, self.mean(self.workers.slot(name)))

    def quiesce(self) -> None:
        super().quiesce()
        if self._delay:
            self._landed[...] = 0
            for fragment in self.fragments:
                if fragment.is_launched:
                    fragment.exchange.chosen.put(fragment.exchange.values, self._landed)

    def shared(self) -> Mapping[str, Array]:
        found = dict(super().shared())
        if self._velocity.size:
            found["outer_velocity"] = self._velocity
        return found

    def arrived(self) -> Mapping[str, Array]:
        return {"landed": self._landed} if self._delay else {}

    def resumed(self, steps_done: int) -> None:
        super().resumed(steps_done)
        done = steps_done - self._start
        for fragment in self.fragments:
            began = done - (done - fragment.offset) % self._period
            fragment.is_launched = began > 0 and done - began < self._delay
            if fragment.is_launched:
                fragment.exchange.chosen.take(self._landed, fragment.exchange.values)
