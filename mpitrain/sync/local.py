"""Local SGD, post-local SGD, DiLoCo and its streaming form.

Each worker trains by itself for ``period`` steps.  Then the workers average their outer gradients
``anchor - weights``, and an outer optimiser moves the anchor by the mean (Stich 2019; Lin et al.
2020; Douillard et al. 2023).  In the streaming form, fragments of the model take turns, and the
mean takes effect ``delay`` steps after it was started (Douillard et al. 2025).
"""

from collections.abc import Iterable, Mapping

import numpy as np

from mpitrain.arrays import Array
from mpitrain.config import Sync
from mpitrain.config.sync import parse_outer
from mpitrain.optim.optimizers import SGD
from mpitrain.step.update import AVERAGE
from mpitrain.sync.anchored import Anchored
from mpitrain.sync.exchange import Exchange
from mpitrain.sync.workers import Workers


class Local(Anchored):
    """The workers average their outer gradients, fragment by fragment.

    Cost of a period: an all-reduce of the parameters, and of the optimiser's state if that is
    averaged, too.  Memory, in arrays as large as the parameters, in addition to
    :class:`~mpitrain.sync.anchored.Anchored`: one, one for an outer velocity, one with a delay.
    """

    def __init__(self, workers: Workers, sync: Sync) -> None:
        """Set up the exchanges; collective; there are at most as many fragments as layers."""
        super().__init__(workers, sync, workers.fragments(sync.fragments))
        self._mix = sync.mix if sync.delay else 0.0
        name, options = parse_outer(sync.outer)
        #: Optimiser of the anchor; None: the anchor moves to the average of the workers' weights.
        self._outer = (
            SGD(options.momentum, nesterov=name == "nesterov") if name != "plain" else None
        )
        self._rate = options.lr
        like = workers.parameters
        self._velocity = np.zeros_like(like if self._outer else like[:0])
        #: For checkpoints: means that have arrived and are not due yet.
        self._landed = np.zeros_like(like if sync.delay else like[:0])
        #: Exchanges that are under way, or complete and not due yet.
        self._launched: set[Exchange] = set()

    def begin(self) -> None:
        super().begin()
        self._launched.clear()

    def _starting(self, done: int) -> list[Exchange]:
        """The exchanges that start after ``done`` steps."""
        pairs, period = zip(self.exchanges, self._sync.offsets, strict=True), self._sync.period
        return [one for one, offset in pairs if done > 0 and (done - offset) % period == 0]

    def _after(self, done: int) -> None:
        starting, delay = self._starting(done), self._sync.delay
        if self.keeps_all and self._outer is None and not self._mix:
            for exchange in starting:  # in floating point x - (x - w) is not w
                chosen = exchange.chosen
                chosen.put(chosen.take(self.workers.parameters), self.anchor)
            return
        if starting:
            self._look()
        if delay:
            self._land(self._starting(done - delay))
        for exchange in starting:
            self._launch(exchange, done)
        if not delay:
            self._land(starting)

    def _launch(self, exchange: Exchange, done: int) -> None:
        """Start the mean of the outer gradients ``anchor - weights``."""
        for there, here in exchange.chosen.runs:
            parameters = self.workers.parameters[there]
            np.subtract(self.anchor[there], parameters, out=exchange.values[here])
        exchange.start(self._sync.start + done - 1)
        self._launched.add(exchange)

    def _land(self, exchanges: Iterable[Exchange]) -> None:
        """Move the anchor by the means, and set the worker's weights to it, in these parts."""
        for exchange in exchanges:
            if exchange not in self._launched:
                continue  # the weights were replaced meanwhile
            self._launched.remove(exchange)
            self._wait(exchange)
            chosen = exchange.chosen
            anchor = chosen.take(self.anchor)
            if self._outer is None:
                anchor -= exchange.values
            else:
                state = {"velocity": chosen.take(self._velocity)}
                way = self._outer.prepare(anchor, exchange.values, state, 1)
                self._outer.apply(anchor, way, state, self._rate)
                chosen.put(state["velocity"], self._velocity)
            chosen.put(anchor, self.anchor)
            if self._mix:
                # Unlike a weighted sum, this keeps the bits of elements that nobody has moved.
                own = chosen.take(self.workers.parameters)
                anchor += self._mix * (own - anchor)
            chosen.put(anchor, self.workers.parameters)
            if self._sync.state == "averaged":
                self._average_state()

    def _average_state(self) -> None:
        for name in self.workers.state[0] if self.workers.state else ():
            if name != AVERAGE:  # the moving average follows the weights, not the gradients
                self.workers.put_slot(name, self.mean(self.workers.slot(name)))

    def quiesce(self) -> None:
        super().quiesce()
        if self._sync.delay:
            self._landed[...] = 0
            for exchange in self._launched:
                exchange.chosen.put(exchange.values, self._landed)

    def shared(self) -> Mapping[str, Array]:
        velocity = {"outer_velocity": self._velocity} if self._outer else {}
        return {**super().shared(), **velocity}

    def arrived(self) -> Mapping[str, Array]:
        return {"landed": self._landed} if self._sync.delay else {}

    def resumed(self, steps_done: int) -> None:
        done, sync = steps_done - self._sync.start, self._sync
        self._launched.clear()
        for exchange, offset in zip(self.exchanges, sync.offsets, strict=True):
            began = done - (done - offset) % sync.period
            if began > 0 and done - began < sync.delay:
                exchange.chosen.take(self._landed, exchange.values)
                self._launched.add(exchange)
