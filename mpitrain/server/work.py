"""What a worker does between two meetings: pull, compute, push, for each batch in turn."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import isfinite, sqrt
from time import perf_counter
from typing import Protocol

import numpy as np

from collectives import Communicator
from mpitrain.arrays import Array
from mpitrain.config import ConfigError, Server
from mpitrain.data import DataError
from mpitrain.kernels import square_sum
from mpitrain.parallel.data_parallel import WholeGradients
from mpitrain.server.messages import MessageKind
from mpitrain.step.agreement import NonFinite, nonfinite
from mpitrain.training.feed import Held


class Exchange(Protocol):
    """Where a worker has its parameters from, and its gradients go.

    Attributes:
        sent: bytes sent, by clock.
    """

    sent: Counter[int]

    def pull(self, clock: int) -> bool:
        """The worker's parameters are those to compute the batch ``clock`` on; False: stop."""

    def push(self, clock: int, clocks: int, gradient: Array, rate: float) -> None:
        """A gradient of ``clocks`` batches from ``clock`` on, which may change at once.

        ``rate``: the learning rate, for those who take the step themselves.
        """

    def end(self, kind: MessageKind, clock: int) -> None:
        """Nothing more before the meeting."""

    def free(self) -> None:
        """Release what is bound."""


@dataclass
class Work:
    """What was done.

    Attributes:
        losses, norms: of each batch, the group's part of the mean loss, and the Euclidean norm of
            its gradient.
        pulling, pushing: seconds.
    """

    losses: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    pulling: float = 0.0
    pushing: float = 0.0


class Worker:
    """A rank that computes.  The first of a group talks to the servers for all of it."""

    def __init__(
        self,
        group: Communicator,
        link: Exchange | None,
        store: WholeGradients,
        parameters: Array,
        server: Server,
        compute: Callable[[int, Array, Held], tuple[float, str]],
        unfit: Callable[[Array, Held], str],
        changed: Callable[[], None],
        rate: Callable[[int], float],
    ) -> None:
        """Nothing is sent yet.

        Args:
            group: the workers that push together.
            link: to the servers, on the first rank of the group.
            store: gradients.
            parameters: flat, as pulled.
            server: the job's table.
            compute: takes the own part of the batch of a clock forward and backward, and returns
                its part of the mean loss, and the name of a parameter that had no part in it, if
                there is one; the store then has the group's gradient.
            unfit: what of the own part of a batch is not finite, if anything is.
            changed: the parameters have.
            rate: the learning rate of a step, counted from 0.
        """
        self._group = group
        self._link = link
        self._store = store
        self._parameters = parameters
        self._server = server
        self._compute = compute
        self._unfit = unfit
        self._changed = changed
        self._rate = rate
        #: Gradients that are not pushed yet, where a push is of several.
        self._kept = np.zeros_like(store.gradients) if server.push > 1 else store.gradients

    def until(self, first: int, stop: int, reading: Iterable[tuple[list[Array], Held]]) -> Work:
        """Take the batches ``first <= i < stop`` in turn.

        Raises:
            DataError: a sample cannot be read; the servers know that this worker has failed.
            NonFinite: a loss or gradient is not finite; so do they.
            ConfigError: a parameter has no part in the loss; so do they.
        """
        work, clock = Work(), first
        try:
            for clock, (batches, held) in enumerate(reading, first):
                if (clock - first) % self._server.fetch == 0 and not self._pull(clock, work):
                    break
                self._clock(clock, batches[0], held, work)
                self._push(clock, first, stop, work)
        except (DataError, NonFinite, ConfigError):
            self._end(MessageKind.FAILED, clock, work)
            raise
        self._end(MessageKind.DONE, clock, work)
        return work

    def _pull(self, clock: int, work: Work) -> bool:
        start = perf_counter()
        goes_on = self._link is None or self._link.pull(clock)
        if self._group.size > 1:
            goes_on = self._group.bcast(goes_on)
            if goes_on:
                self._group.Bcast(self._parameters, 0, algorithm="native")
        self._changed()
        work.pulling += perf_counter() - start
        return goes_on

    def _clock(self, clock: int, batch: Array, held: Held, work: Work) -> None:
        loss, unused = self._compute(clock, batch, held)
        if self._group.size > 1:
            told = self._group.allgather((loss, unused))
            loss = sum(part for part, _ in told)
            unused = next((name for _, name in told if name), "")
        if unused:
            raise ConfigError(
                f"server: {unused} has no part in the loss of step {clock + 1}, and servers update "
                "all parameters; freeze it (requires_grad = False), or train without servers"
            )
        work.losses[clock] = loss
        work.norms[clock] = sqrt(square_sum(self._store.gradients))
        if not (isfinite(loss) and isfinite(work.norms[clock])):
            data = self._unfit(batch, held)
            if self._group.size > 1:
                data = next(filter(None, self._group.allgather(data)), "")
            raise NonFinite(nonfinite(clock + 1, "", data, also="a smaller server.bound"))
        if self._server.fetch > 1:  # Downpour's own steps, until the next pull
            self._parameters -= self._rate(clock) * self._store.gradients
            self._changed()

    def _push(self, clock: int, first: int, stop: int, work: Work) -> None:
        start = perf_counter()
        kept = self._kept
        if self._server.push > 1:
            kept += self._store.gradients
        clocks = (clock - first) % self._server.push + 1
        if clocks == self._server.push or clock + 1 == stop:
            if self._link:
                self._link.push(clock + 1 - clocks, clocks, kept, self._rate(clock))
            if self._server.push > 1:
                kept[...] = 0
        work.pushing += perf_counter() - start

    def _end(self, kind: MessageKind, clock: int, work: Work) -> None:
        start = perf_counter()
        if self._link:
            self._link.end(kind, clock)
        self._kept[...] = 0
        work.pushing += perf_counter() - start
