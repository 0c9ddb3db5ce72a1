"""Updates of a pipeline that does not drain, and the weights of a micro-batch meanwhile.

Each stage updates by itself; the ranks agree afterwards.  Versions of weights are counted in
updates; the schedule says which one is due before anything runs: see ``Report.versions`` and
``Report.staleness`` of :mod:`mpitrain.pipeline.replay`.

| policy      | forward                           | backward   | found in                       |
| ----------- | --------------------------------- | ---------- | ------------------------------ |
| stash       | latest                            | as forward | PipeDream (2019)               |
| vertical    | as the first stage saw            | as forward | PipeDream's vertical sync      |
| two_buffers | of the batch before               | as forward | PipeDream-2BW (2021)           |
| spectrain   | moved on along the velocity       | latest     | SpecTrain (Chen et al. 2018)   |
| linear      | moved on along the last change    | latest     | Kosson et al. 2021             |
| latest      | latest                            | latest     | for comparison: no gradient    |
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Literal, NamedTuple

import numpy as np
from mpi4py import MPI

from mpitrain.arrays import Array, Parameters, Scalar, array_namespace
from mpitrain.config import ConfigError
from mpitrain.parallel.arena import Arena
from mpitrain.parallel.data_parallel import Replicated
from mpitrain.parallel.grid import ProcessGrid
from mpitrain.pipeline.replay import Report
from mpitrain.pipeline.runtime import Runner
from mpitrain.step.agreement import NonFinite, named, nonfinite
from mpitrain.step.gradient import GlobalGradient
from mpitrain.step.update import Updater

Policy = Literal["stash", "vertical", "two_buffers", "spectrain", "linear", "latest"]
#: Policies whose backward pass has other weights than the forward pass.
OTHER_IN_BACKWARD: tuple[Policy, ...] = ("spectrain", "linear", "latest")


class FixedWeights:
    """Flat parameters as layers see them."""

    def __init__(self, arena: Arena, flat: Array) -> None:
        self._views = arena.views(flat)

    def take(self, layer: int) -> Parameters:
        return self._views[layer]

    def release(self, layer: int) -> None:
        pass


@dataclass(eq=False)
class VersionedWeights:
    """Keeps the versions that micro-batches under way still need.

    The store's flat parameters are the latest version.  It is copied before an update if a
    micro-batch still needs it, or before its first use if layers hold their parameters
    (:attr:`mpitrain.nn.Layer.holds`).

    Attributes:
        policy: rule for the versions.
        arena: layout of the parameters.
        latest: the latest parameters, flat.
        report: report of the replay of the schedule.
        stage: the own stage.
        along_velocity: motion of the flat weights by the velocity in one update.
        are_held: whether layers hold the weights of their forward passes.
    """

    policy: Policy
    arena: Arena
    latest: Array
    report: Report
    stage: int
    along_velocity: Callable[[], Array]
    are_held: bool = False

    def __post_init__(self) -> None:
        self._before: Array | None = None
        self._version = 0
        self._kept: dict[int, Array] = {}
        self._due = {m: self._which(m) for s, m in self.report.versions if s == self.stage}
        self._under_way: dict[int, int] = {}

    def forward(self, micro_batch: int) -> FixedWeights:
        """For the forward pass."""
        version = self._due[micro_batch]
        self._under_way[micro_batch] = version
        if self.policy in ("spectrain", "linear"):
            ahead = self.report.staleness[self.stage, micro_batch]
            return FixedWeights(self.arena, self.latest + ahead * self._motion())
        return FixedWeights(self.arena, self._at(version))

    def backward(self, micro_batch: int) -> FixedWeights:
        """For the backward pass."""
        if self.policy in OTHER_IN_BACKWARD:
            return FixedWeights(self.arena, self.latest)
        return FixedWeights(self.arena, self._at(self._under_way[micro_batch]))

    def done(self, micro_batch: int) -> None:
        """Its backward pass is over."""
        self._under_way.pop(micro_batch)
        self._due.pop(micro_batch)
        needed = set(self._due.values())
        self._kept = {v: flat for v, flat in self._kept.items() if v in needed}

    def before_update(self) -> None:
        """Keep the latest weights before they change, if they are needed."""
        if self.policy == "linear":
            self._before = self.latest.copy()
        if self._version in self._due.values():
            self._keep()
        self._version += 1

    @property
    def versions_held(self) -> int:
        """Copies of the weights, the latest included."""
        return 1 + len(self._kept)

    def _motion(self) -> Array:
        """Expected motion of the weights in one update."""
        if self.policy == "spectrain":
            return self.along_velocity()
        if self._before is None:
            return 0 * self.latest
        return self.latest - self._before

    def _which(self, micro_batch: int) -> int:
        match self.policy:
            case "vertical":
                return self.report.versions[0, micro_batch]
            case "two_buffers":
                own = self.report.pipeline.own(
                    self.stage, self.report.pipeline.replica(self.stage, micro_batch)
                )
                batch = own.index(micro_batch) // self.report.pipeline.accumulate
                return max(0, batch - 1)
            case _:
                return self.report.versions[self.stage, micro_batch]

    def _keep(self) -> None:
        """A copy of the latest version, once."""
        if self._version not in self._kept:
            self._kept[self._version] = self.latest.copy()

    def _at(self, version: int) -> Array:
        if version == self._version:
            if not self.are_held:
                return self.latest
            self._keep()
        return self._kept[version]


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
