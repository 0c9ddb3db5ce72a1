"""A server's part of the parameters, and the effects of pulls and pushes, without messages."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mpitrain.arrays import Array
from mpitrain.optim.optimizers import State
from mpitrain.parallel.store import Piece


@dataclass(frozen=True)
class Push:
    """A group's gradient was applied; with ``bound = 0``, when enough of its clock had come.

    Attributes:
        clock, clocks: first batch, and number of batches.
        lag: pushes since the last meeting that its parameters lacked.
        behind: clocks of the slowest worker that they lack, at most ``bound``: the own clock less
            the slowest one's at the pull.
    """

    clock: int
    clocks: int
    lag: int
    behind: int


@dataclass(eq=False)
class Shard:
    """Parameters of one server between two meetings.

    Clocks are counted through the whole run: a worker of clock c has pushed the gradients of c
    batches.  Versions count the pushes that were served since the last meeting.

    Attributes:
        piece, state: the own part, and the optimiser's arrays of it.
        update: takes a step along the piece's gradients, of a learning rate and a number.
        rate: learning rate of a step, counted from 0.
        workers: number of workers that push.
        limit: most clocks ahead of the slowest worker; None: any number.
        needed: gradients of a clock that make a step where ``limit`` is 0.
        looks_ahead: whether workers pull ``w - rate * E[lag] * velocity``, to which momentum will
            have moved w by then (SpecTrain, Chen et al. 2018, for pipelines).
        squares: squared norm of the sum of a clock's gradients, by clock, with ``bound = 0``.
    """

    piece: Piece
    state: State
    update: Callable[[float, int], None]
    rate: Callable[[int], float]
    workers: int
    limit: int | None
    needed: int
    looks_ahead: bool = False

    def __post_init__(self) -> None:
        self.meet(0)

    def meet(self, clock: int) -> None:
        """Begin again: all workers have this clock, and no message is on its way."""
        self.clocks = [clock] * self.workers
        self.version = 0
        self.squares: dict[int, float] = {}
        #: Sum and number of the lags, and of one that is usual where all workers are equally fast.
        self._lags = np.array([self.workers - 1, 1])
        #: The clock whose gradients are summed where ``limit`` is 0, and those that have come.
        self._open, self._round = clock, dict[int, Array]()
        #: Version and least clock at each worker's last pull, and at the first since its last push.
        self._last = [(0, clock)] * self.workers
        self._first: list[tuple[int, int] | None] = [None] * self.workers

    @property
    def step(self) -> int:
        """The step for the learning rate: with ``limit`` 0 the clock that is open, else the mean of
        all, rounded down."""
        return self._open if self.limit == 0 else sum(self.clocks) // self.workers

    def may_pull(self, worker: int) -> bool:
        """Whether a worker is at most ``limit`` clocks ahead of the slowest (Ho et al. 2013)."""
        if self.limit == 0:
            return self._open >= self.clocks[worker]
        return self.limit is None or min(self.clocks) >= self.clocks[worker] - self.limit

    def pull(self, worker: int, out: Array) -> None:
        """Write the parameters for a worker to ``out``, of shape (elements,)."""
        out[...] = self.piece.parameters
        total, count = self._lags
        if self.looks_ahead and total:
            out -= self.rate(self.step) * (total / count) * self.state["velocity"]
        self._last[worker] = self.version, min(self.clocks)
        self._first[worker] = self._first[worker] or self._last[worker]

    def push(self, worker: int, clock: int, clocks: int, gradient: Array) -> Push | None:
        """Apply a gradient of shape (elements,), or with ``limit`` 0 the sum of as many as are
        needed when they have come; None: this one came later, and is dropped.

        It is of ``clocks`` batches from ``clock`` on.
        """
        version, slowest = self._first[worker] or self._last[worker]
        self._first[worker] = None
        told = None
        if self.limit != 0:
            told = Push(clock, clocks, self.version - version, clock - slowest)
            self._lags += told.lag, 1
            self.piece.gradients[...] = gradient
            self.update(self.rate(self.step), self.step)
        elif clock == self._open:
            told = Push(clock, clocks, lag=0, behind=0)
            self._collect(worker, clock, gradient)
        self.clocks[worker] = clock + clocks
        self.version += 1
        return told

    def _collect(self, worker: int, clock: int, gradient: Array) -> None:
        """The sum in the order of the workers, as the ``parameter_server`` all-reduce has it."""
        self._round[worker] = gradient.copy()
        if len(self._round) < self.needed:
            return
        total = self.piece.gradients
        first, *others = sorted(self._round)
        total[...] = self._round[first]
        for other in others:
            total += self._round[other]
        if self.needed < self.workers:
            total *= self.workers / self.needed
        self._round.clear()
        self._open += 1
        self.squares[clock] = float(np.sum(np.square(total, dtype=np.float64)))
        self.update(self.rate(clock), clock)
