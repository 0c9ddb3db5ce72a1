"""Which weights a micro-batch sees where updates do not wait for it.

Versions are counted in updates, and which one is due follows from the schedule before anything
runs: see ``Report.versions`` and ``Report.staleness`` of :mod:`mpitrain.pipeline.replay`.

| policy      | forward                           | backward   | found in                       |
| ----------- | --------------------------------- | ---------- | ------------------------------ |
| stash       | latest                            | as forward | PipeDream (2019)               |
| vertical    | as the first stage saw            | as forward | PipeDream's vertical sync      |
| two_buffers | of the batch before               | as forward | PipeDream-2BW (2021)           |
| spectrain   | moved on along the velocity       | latest     | SpecTrain (Chen et al. 2018)   |
| linear      | moved on along the last change    | latest     | Kosson et al. 2021             |
| latest      | latest                            | latest     | for comparison: no gradient    |
"""

from collections.abc import Callable
from typing import Literal

from mpitrain.arrays import Array, Parameters
from mpitrain.parallel.arena import Arena
from mpitrain.pipeline.actions import Pipeline
from mpitrain.pipeline.replay import Report

Policy = Literal["stash", "vertical", "two_buffers", "spectrain", "linear", "latest"]
#: Policies whose backward pass has other weights than its forward pass.
_OTHER_IN_BACKWARD: tuple[Policy, ...] = ("spectrain", "linear", "latest")


class FixedWeights:
    """Flat parameters as layers see them."""

    def __init__(self, arena: Arena, flat: Array) -> None:
        self._views = arena.views(flat)

    def take(self, layer: int) -> Parameters:
        return self._views[layer]

    def release(self, layer: int) -> None:
        pass


class VersionedWeights:
    """Keeps the versions that micro-batches on their way still need.

    The store's flat parameters are the latest; a version is copied when an update is about to
    change it and somebody needs it still, or before anybody sees it where layers hold what they
    were given (:attr:`mpitrain.nn.Layer.holds`).
    """

    def __init__(
        self,
        policy: Policy,
        arena: Arena,
        latest: Array,
        pipeline: Pipeline,
        report: Report,
        stage: int,
        along_velocity: Callable[[], Array],
        *,
        are_held: bool = False,
    ) -> None:
        """``along_velocity()``: what the velocity moves the flat weights by in one update;
        ``are_held``: whether layers hold the weights of their forward passes."""
        self._policy = policy
        self._arena = arena
        self._latest = latest
        self._pipeline = pipeline
        self._report = report
        self._stage = stage
        self._along_velocity = along_velocity
        self._are_held = are_held
        self._before: Array | None = None
        self._version = 0
        self._kept: dict[int, Array] = {}
        own = [m for s, m in report.versions if s == stage]
        self._due = {m: self._which(m) for m in own}
        self._under_way: dict[int, int] = {}

    def forward(self, micro_batch: int) -> FixedWeights:
        """For the forward pass."""
        version = self._due[micro_batch]
        self._under_way[micro_batch] = version
        if self._policy in ("spectrain", "linear"):
            ahead = self._report.staleness[self._stage, micro_batch]
            return FixedWeights(self._arena, self._latest + ahead * self._motion())
        return FixedWeights(self._arena, self._at(version))

    def backward(self, micro_batch: int) -> FixedWeights:
        """For the backward pass."""
        if self._policy in _OTHER_IN_BACKWARD:
            return FixedWeights(self._arena, self._latest)
        return FixedWeights(self._arena, self._at(self._under_way[micro_batch]))

    def done(self, micro_batch: int) -> None:
        """Its backward pass is over."""
        self._under_way.pop(micro_batch)
        self._due.pop(micro_batch)
        needed = set(self._due.values())
        self._kept = {v: flat for v, flat in self._kept.items() if v in needed}

    def before_update(self) -> None:
        """The latest weights are about to change."""
        if self._policy == "linear":
            self._before = self._latest.copy()
        if self._version in self._due.values():
            self._keep()
        self._version += 1

    @property
    def versions_held(self) -> int:
        """Copies of the weights, the latest included."""
        return 1 + len(self._kept)

    def _motion(self) -> Array:
        """By what one update is expected to move the weights."""
        if self._policy == "spectrain":
            return self._along_velocity()
        if self._before is None:
            return 0 * self._latest
        return self._latest - self._before

    def _which(self, micro_batch: int) -> int:
        match self._policy:
            case "vertical":
                return self._report.versions[0, micro_batch]
            case "two_buffers":
                own = self._pipeline.own(
                    self._stage, self._pipeline.replica(self._stage, micro_batch)
                )
                batch = own.index(micro_batch) // self._pipeline.accumulate
                return max(0, batch - 1)
            case _:
                return self._report.versions[self._stage, micro_batch]

    def _keep(self) -> None:
        """A copy of the latest version, once."""
        if self._version not in self._kept:
            self._kept[self._version] = self._latest.copy()

    def _at(self, version: int) -> Array:
        if version == self._version:
            if not self._are_held:
                return self._latest
            self._keep()
        return self._kept[version]
