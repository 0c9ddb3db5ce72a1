"""A pipeline that does not drain: each stage updates by itself, and the ranks agree afterwards."""

from collections.abc import Callable
from math import isfinite, sqrt

import numpy as np
from mpi4py import MPI

from mpitrain.nn import Array
from mpitrain.parallel.grid import ProcessGrid
from mpitrain.parallel.store import Store
from mpitrain.pipeline.runtime import Runner
from mpitrain.pipeline.weights import Policy, VersionedWeights
from mpitrain.update import NonFinite, Updater


class Window:
    """The updates of one window of steps.

    No update waits for another stage: only replicas of a stage meet, in the sum of their gradients.

    Attributes:
        weights: what micro-batches see.
    """

    def __init__(
        self,
        grid: ProcessGrid,
        store: Store,
        updater: Updater,
        runner: Runner,
        policy: Policy,
        rate: Callable[[int], float],
    ) -> None:
        """``rate(steps)``: the learning rate after so many steps."""
        self._grid = grid
        self._store = store
        self._updater = updater
        self._rate = rate
        self._records: list[tuple[float, float, float]] = []
        self._flat: Array = store.parameters  # type: ignore[attr-defined]
        self.weights = VersionedWeights(
            policy,
            store.arena,
            self._flat,
            runner.pipeline,
            runner.report,
            grid.place.stage,
            self._motion,
        )

    def update(self, number: int, loss: float) -> None:
        """Sum the gradients over the replicas, and step."""
        with self._grid.comm.waiting("the sum of gradients"):
            comm_seconds = self._store.wait()
        self.weights.before_update()
        squares = self._updater.own_squares()
        own = loss if self._grid.place.tensor == 0 else 0.0
        self._records.append((own, squares, comm_seconds))
        self._updater.step(self._rate(self._updater.steps))
        self._store.reset()

    @property
    def reducing(self) -> float:
        """Seconds that this rank has spent in the sums of gradients."""
        return sum(seconds for _, _, seconds in self._records)

    def agree(self, steps_done: int) -> list[tuple[float, float, float]]:
        """(loss, gradient norm, seconds in communication of all ranks) of each update; collective.

        Raises:
            NonFinite: on all ranks, if one of the losses or norms is not.
        """
        totals = np.array(self._records)
        self._grid.comm.Allreduce(MPI.IN_PLACE, totals, algorithm="native")
        found = [(loss, sqrt(squares), seconds) for loss, squares, seconds in totals.tolist()]
        for index, (loss, norm, _) in enumerate(found):
            if not (isfinite(loss) and isfinite(norm)):
                raise NonFinite(
                    f"the loss or a gradient is not finite at step {steps_done + 1 + index}; a "
                    "smaller optim.lr or a longer optim.warmup_epochs may help"
                )
        return found

    def _motion(self) -> Array:
        motion = np.empty_like(self._flat)
        lr = self._rate(self._updater.steps)
        for piece, state in zip(self._store.pieces, self._updater.state, strict=True):
            motion[piece.start : piece.stop] = -lr * state["velocity"]
        return motion
