"""Updates of a pipeline that does not drain: each stage by itself; the ranks agree afterwards."""

from collections.abc import Callable, Sequence
from math import isfinite, sqrt
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpitrain.arrays import Array, Scalar, array_namespace
from mpitrain.config import ConfigError
from mpitrain.parallel.data_parallel import Replicated
from mpitrain.parallel.grid import ProcessGrid
from mpitrain.pipeline.runtime import Runner
from mpitrain.pipeline.weights import Policy, VersionedWeights
from mpitrain.step.agreement import NonFinite, named, nonfinite
from mpitrain.step.gradient import GlobalGradient
from mpitrain.step.update import Updater


class Updated(NamedTuple):
    """Results of an update on one rank, or their sums over the ranks.

    Attributes:
        loss: part of the mean over the batch.
        squares: part of the squared norm of the gradient.
        comm_seconds: seconds in communication.
        unused: number of tensors that had no part in the loss.
    """

    loss: Scalar
    squares: Scalar
    comm_seconds: float
    unused: float

    @property
    def grad_norm(self) -> float:
        """Euclidean norm of the gradient."""
        return sqrt(self.squares)


class UpdateWindow:
    """The updates of one window of steps.

    No update waits for another stage: only replicas of a stage meet, in the sum of their gradients.

    Attributes:
        weights: weights for micro-batches.
    """

    def __init__(
        self,
        grid: ProcessGrid,
        store: Replicated,
        gradient: GlobalGradient,
        updater: Updater,
        runner: Runner,
        policy: Policy,
        rate: Callable[[int], float],
        *,
        are_held: bool,
    ) -> None:
        """``rate(steps)``: the learning rate after this many steps; ``are_held``: whether layers
        hold the weights of their forward passes."""
        self._grid = grid
        self._store = store
        self._gradient = gradient
        self._updater = updater
        self._rate = rate
        self._unused: list[frozenset[str]] = []
        self.weights = VersionedWeights(
            policy,
            store.arena,
            store.parameters,
            runner.report,
            grid.place.stage,
            self._along_velocity,
            are_held=are_held,
        )

    def update(self, number: int, loss: Scalar) -> Updated:
        """Sum the gradients over the replicas, and step; returns the results on this rank."""
        with self._grid.comm.waiting("the sum of gradients"):
            comm_seconds = self._store.wait()
        self.weights.before_update()
        squares = self._gradient.own_squares()
        own = loss if self._grid.place.tensor == 0 else 0.0
        names = frozenset(tensor.name for tensor in self._store.arena.tensors)
        self._unused.append(names - self._store.used)
        self._updater.step(self._rate(self._updater.steps))
        self._store.reset()
        return Updated(own, squares, comm_seconds, len(self._unused[-1]))

    def agree(
        self, own: Sequence[Updated], steps_done: int, unfit: Callable[[int], str]
    ) -> list[Updated]:
        """Sums of the results of updates over the ranks; collective.

        Args:
            own: results of :meth:`update`.
            steps_done: steps before the first update.
            unfit: names data of this rank that are not finite, by the update's number from 0 on.

        Raises:
            NonFinite: on all ranks, if one of the losses or norms is not.
            ConfigError: on all ranks, if a parameter had no part in the loss.
        """
        read = self._gradient.read([one for each in own for one in (each.loss, each.squares)])
        numbers = zip(own, read[::2], read[1::2], strict=True)
        totals = np.array([each._replace(loss=a, squares=b) for each, a, b in numbers])
        self._grid.comm.Allreduce(MPI.IN_PLACE, totals, algorithm="native")
        found = [Updated(*total) for total in totals.tolist()]
        if any(total.unused for total in found):
            self._expect_used()
        for index, total in enumerate(found):
            if not (isfinite(total.loss) and isfinite(total.squares)):
                data = named(self._grid.comm, unfit(index))
                number = steps_done + 1 + index
                raise NonFinite(nonfinite(number, "", data, also=""))
        return found

    def _expect_used(self) -> None:
        """Raise if no replica of a stage has used a tensor in a step; collective.

        A replica without samples uses none.
        """
        told = self._grid.comm.allgather((self._grid.place.stage, self._unused))
        stages = [[steps for s, steps in told if s == stage] for stage in {s for s, _ in told}]
        by_none = [frozenset.intersection(*step) for own in stages for step in zip(*own)]
        if names := sorted(frozenset[str]().union(*by_none)):
            raise ConfigError(
                f"parallel.schedule: asynchronous moves every parameter in every step, and the "
                f"loss does not follow from {', '.join(names[:3])}; freeze what is not used "
                "(requires_grad_(False)), or set schedule = '1f1b'"
            )

    def _along_velocity(self) -> Array:
        like = self._store.parameters
        motion = array_namespace(like).empty_like(like)
        lr = self._rate(self._updater.steps)
        for piece, state in zip(self._store.pieces, self._updater.state, strict=True):
            motion[piece.start : piece.stop] = -lr * state["velocity"]
        return motion
