"""Weights of a micro-batch in schedules whose updates do not wait for it.

Versions are counted in updates; the schedule says which one is due before anything runs: see
``Report.versions`` and ``Report.staleness`` of :mod:`mpitrain.pipeline.replay`.

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
from typing import Literal

from mpitrain.arrays import Array, Parameters
from mpitrain.parallel.arena import Arena
from mpitrain.pipeline.replay import Report, StageReplica

Policy = Literal["stash", "vertical", "two_buffers", "spectrain", "linear", "latest"]
#: Policies whose backward pass has other weights than the forward pass.
OTHER_IN_BACKWARD: tuple[Policy, ...] = ("spectrain", "linear", "latest")


class FixedWeights:
    """Flat parameters as layers see them."""

    def __init__(self, arena: Arena, flat: Array) -> None:
        self._views = arena.views(flat)

    def take(self, layer: int, following: Sequence[int] = ()) -> Parameters:
        return self._views[layer]

    def release(self, layer: int) -> None:
        pass


@dataclass(eq=False)
class VersionedWeights:
    """Keeps the versions that micro-batches under way still need, on a stage.

    The store's flat parameters are the latest version.  It is copied before an update if a
    micro-batch still needs it, or before its first use if layers hold their parameters
    (:attr:`mpitrain.nn.Layer.holds`).

    Attributes:
        report: report of the replay of the schedule.
        place: the own stage and replica.
        along_velocity: motion of the flat weights by the velocity in one update.
        are_held: whether layers hold the weights of their forward passes.
        version: the latest one: updates of this run.
    """

    policy: Policy
    arena: Arena
    latest: Array
    report: Report
    place: StageReplica
    along_velocity: Callable[[], Array]
    are_held: bool = False

    def __post_init__(self) -> None:
        self._before: Array | None = None
        self.version = 0
        self._kept: dict[int, Array] = {}
        self._due = {m: self._which(m) for m in self.report.pipeline.own(*self.place)}
        self._under_way: dict[int, int] = {}

    def forward(self, micro_batch: int) -> FixedWeights:
        version = self._due[micro_batch]
        self._under_way[micro_batch] = version
        if self.policy in ("spectrain", "linear"):
            ahead = self.report.staleness[self.place[0], micro_batch]
            return FixedWeights(self.arena, self.latest + ahead * self._motion())
        return FixedWeights(self.arena, self._at(version))

    def backward(self, micro_batch: int) -> FixedWeights:
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
        if self.version in self._due.values():
            self._keep()
        self.version += 1

    def _motion(self) -> Array:
        """Expected motion of the weights in one update."""
        if self.policy == "spectrain":
            return self.along_velocity()
        if self._before is None:
            return 0 * self.latest
        return self.latest - self._before

    def _which(self, micro_batch: int) -> int:
        pipeline, stage = self.report.pipeline, self.place[0]
        replicas = pipeline.replicas
        match self.policy:
            case "vertical":  # the version with the first stage's samples
                return self.report.versions[0, micro_batch] * replicas[0] // replicas[stage]
            case "two_buffers":
                return max(0, micro_batch // (pipeline.accumulate * replicas[stage]) - 1)
            case _:
                return self.report.versions[stage, micro_batch]

    def _keep(self) -> None:
        """A copy of the latest version, once."""
        if self.version not in self._kept:
            self._kept[self.version] = self.latest.copy()

    def _at(self, version: int) -> Array:
        if version == self.version:
            if not self.are_held:
                return self.latest
            self._keep()
        return self._kept[version]
