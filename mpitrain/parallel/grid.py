"""Layout of ranks: pipeline stages, their replicas, and the ranks that share each layer."""

from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from mpitrain.group import TensorGroup
from mpitrain.parallel.arena import COPIES, DATA, SPREAD, SUMMED, copies_of
from mpitrain.ranks.together import ClosedTogether


class Coordinates(NamedTuple):
    """Coordinates of a rank: its stage, its replica of the stage, its part of the layers, and of
    the positions or rows."""

    stage: int
    replica: int
    tensor: int
    context: int = 0


def axes(
    data: object, pipe: int, tensor: int, context: int = 1, experts: int = 1, *, rows: bool = False
) -> str:
    """Lengths of the axes of a layout in words, as ``data 2 x pipe 2 x tensor 1``."""
    found = f"data {data} x pipe {pipe} x tensor {tensor}"
    found += f" x {'space' if rows else 'context'} {context}" if context > 1 else ""
    return found + (f", experts {experts}" if experts > 1 else "")


@dataclass(frozen=True)
class Layout:
    """Stages of a pipeline, replicas of each, context and tensor ranks of each replica.

    Tensor ranks, which talk most, are neighbours; then the context ranks of a replica; then the
    replicas of a stage; then the stages.

    Attributes:
        replicas: number of replicas of each stage; (2, 2) is two pipelines of two stages,
            (2, 1, 1) PipeDream's "2-1-1".
        tensor: ranks that share each layer.
        context: ranks that share the positions of each sample, or the rows of each image.
        experts: neighbouring replicas that have a share of the experts each; 0: all of a stage.
        rows: whether context ranks share rows.
    """

    replicas: tuple[int, ...] = (1,)
    tensor: int = 1
    context: int = 1
    experts: int = 1
    rows: bool = False

    @property
    def stages(self) -> int:
        """Length of the pipeline."""
        return len(self.replicas)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return sum(self.replicas) * self.context * self.tensor

    def rank(self, place: Coordinates) -> int:
        """The rank at these coordinates."""
        before = sum(self.replicas[: place.stage]) + place.replica
        return (before * self.context + place.context) * self.tensor + place.tensor

    def place(self, rank: int) -> Coordinates:
        """The coordinates of a rank."""
        column, tensor = divmod(rank, self.tensor)
        column, context = divmod(column, self.context)
        for stage, count in enumerate(self.replicas):
            if column < count:
                return Coordinates(stage, column, tensor, context)
            column -= count
        raise ValueError(f"rank {rank} is not one of the {self.ranks} of this layout")

    def __str__(self) -> str:
        even = len(set(self.replicas)) == 1
        data = self.replicas[0] if even else "-".join(map(str, self.replicas))
        return axes(data, self.stages, self.tensor, self.context, self.experts, rows=self.rows)


class ProcessGrid(ClosedTogether):
    """The communicators of a layout.

    Attributes:
        layout: the layout.
        comm: communicator of all ranks.
        place: the own coordinates.
        tensor: ranks that share our layers.
        context: ranks that share the positions or rows of our samples.
        spread: replicas of our stage that have a part each of what is spread over replicas.
        groups: ranks whose gradients are summed with ours, for each group of an arena (see
            :mod:`mpitrain.parallel.arena`).
    """

    def __init__(
        self,
        comm: Communicator,
        layout: Layout,
        shared: Iterable[frozenset[int]] = (),
        xp: ModuleType = np,
    ) -> None:
        """Split ``comm``, of the layout's size; collective.

        ``shared``: sets of stages that hold a tensor together.
        """
        if comm.size != layout.ranks:
            raise ValueError(f"{layout} is {layout.ranks} ranks, but there are {comm.size}")
        self.comm = comm
        self.layout = layout
        self._xp = xp
        self._shared = sorted(set(shared), key=sorted)
        self.place = layout.place(comm.rank)
        stage, _, tensor, context = self.place
        data = comm.Split(stage * layout.tensor + tensor, comm.rank)
        self._alone = alone = comm.Split(comm.rank)
        self._comms = [data, alone]
        each, alike = layout.experts or data.size, data
        self.spread = TensorGroup()
        if each > 1:
            self._comms += [data.Split(data.rank // each), data.Split(data.rank % each)]
            among, alike = self._comms[-2:]
            self.spread = TensorGroup(among)
        self.groups = {DATA: data, COPIES: data, SPREAD: alike}
        if layout.tensor > 1:
            sharers = comm.Split(layout.rank(self.place._replace(tensor=0)), tensor)
            together = comm.Split(stage, comm.rank)
            self._comms += [sharers, together]
            self.groups[SUMMED] = together
            self.tensor = TensorGroup(sharers)
        else:
            self.tensor = TensorGroup()
        self.context = TensorGroup()
        if layout.context > 1:
            ring = comm.Split(layout.rank(self.place._replace(context=0)), context)
            self._comms.append(ring)
            self.context = TensorGroup(ring)
        self._comms += self._split_holders(self.groups, tensor)
        for own in self._comms:
            use_once(own, self._xp)

    def _split_holders(self, groups: dict[str, Communicator], color: int) -> list[Communicator]:
        """Add the ranks of each set of stages that hold a tensor together to groups; collective."""
        made = []
        for stages in self._shared:
            is_in = self.place.stage in stages
            holders = self.comm.Split(color if is_in else MPI.UNDEFINED, self.comm.rank)
            if is_in:
                name = shared_name(stages)
                groups[name] = groups[copies_of(name)] = holders
                made.append(holders)
        return made

    @property
    def data(self) -> Communicator:
        """The replicas of our stage, each with all of its context ranks."""
        return self.groups[DATA]

    def within(self) -> tuple[dict[str, Communicator], Communicator]:
        """The groups of an arena within our own replica, and all ranks of it; collective.

        All stages of the layout have equally many replicas, and one context rank each.
        """
        _, replica, tensor, _ = self.place
        alone = self._alone
        groups = {DATA: alone, COPIES: alone, SPREAD: alone}
        column = self.comm.Split(replica, self.comm.rank)
        made = [column]
        if self.tensor.comm is not None:
            groups[SUMMED] = self.tensor.comm
        made += self._split_holders(groups, replica * self.layout.tensor + tensor)
        for own in made:
            use_once(own, self._xp)
        self._comms += made
        return groups, column

    def owns(self, group: str) -> bool:
        """Whether this rank counts its tensors of a group in a norm over the model."""
        return not group.endswith(COPIES) or self.place.tensor == 0

    @property
    def comms(self) -> list[Communicator]:
        """All communicators that were split off."""
        return list(self._comms)

    def close(self) -> None:
        """Free the communicators; collective."""
        while self._comms:
            self._comms.pop().Free()


def use_once(comm: Communicator, xp: ModuleType = np) -> None:
    """Run the first collectives of a communicator, on the host and on a device.

    They make communicators of their own.  Later, ranks would do that for different communicators at
    the same time, which Open MPI's allocation of communicators does not survive.
    """
    for nothing in [np.zeros(1)] + ([] if xp is np else [xp.zeros(1)]):
        for algorithm in ("auto", "ring"):
            comm.Allreduce(MPI.IN_PLACE, nothing, algorithm=algorithm)


def shared_name(stages: frozenset[int]) -> str:
    """Name of the group of the stages that hold a tensor together."""
    return f"stages {', '.join(map(str, sorted(stages)))}"
