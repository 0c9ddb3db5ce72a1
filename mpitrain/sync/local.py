"""Local SGD, post-local SGD, DiLoCo and its streaming form.

``period`` steps by oneself, then the workers' ways ``anchor - weights`` are averaged, and an outer
optimiser moves the anchor by their mean (Stich 2019; Lin et al. 2020; Douillard et al. 2023).  In
the streaming form, fragments of the model take turns, and the mean takes effect ``delay`` steps
after it was started (Douillard et al. 2025).
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
        exchange: mean of the workers' ways.
        offset: it starts after steps whose number modulo the period is this.
        is_launched: whether it is under way, or has arrived and is not due yet.
    """

    exchange: Exchange
    offset: int
    is_launched: bool = False


class Local(Anchored):
    """The workers average their ways, fragment by fragment.

    Cost a period: an all-reduce of the parameters, and of the optimiser's state where that is
    averaged, too.  Memory: one array as large as the parameters besides those of
    :class:`~mpitrain.sync.anchored.Anchored`, one for an outer velocity, one with a delay.

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
        """Bind the exchanges; collective.

        Args:
            workers: this rank's, and the others.
            period: steps from one exchange of a fragment to the next.
            outer: moves the anchor.
            start: first steps, in which the workers average their gradients.
            fragments: at most ``period``, and at most as many as the model has layers.
            delay: steps until an exchange takes effect, less than ``period``.
            mix: with a delay, part of its weights that a worker keeps when it does.
            averages_state: average the optimiser's state, too; for one fragment without delay.
        """
        super().__init__(workers, start)
        self._period, self._delay, self._outer = period, delay, outer
        self._mix = mix if delay else 0.0
        self._averages_state = averages_state
        self._velocity = velocity(outer, workers.parameters)
        #: Means that have arrived, for checkpoints.
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
        """The fragments whose exchange starts after so many steps."""
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
        """Start the mean of the ways: ``way = anchor - weights``, as a gradient points uphill."""
        exchange = fragment.exchange
        for run in exchange.chosen.runs:
            part = slice(run.start, run.stop)
            into = exchange.values[run.at : run.at + run.stop - run.start]
            np.subtract(self.anchor[part], self.workers.parameters[part], out=into)
        exchange.start(self._start + done - 1)
        fragment.is_launched = True

    def _land(self, fragments: Iterable[Fragment]) -> None:
        """Anchors move by the means, and the worker's weights follow them."""
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
                # Like this, and not as a weighted sum, what nobody has moved keeps its bits.
                own = chosen.take(self.workers.parameters)
                anchor += self._mix * (own - anchor)
            chosen.put(anchor, self.workers.parameters)
            fragment.is_launched = False
            if self._averages_state:
                self._average_state()

    def _average_state(self) -> None:
        for name in self.workers.state[0] if self.workers.state else ():
            if name != AVERAGE:  # which follows the weights, and not the gradients
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
