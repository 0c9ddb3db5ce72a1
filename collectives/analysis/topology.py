"""Networks for the simulator: which shared links the messages of a round go through."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from collectives.algorithms.links import Lanes, among, dgx1, distances, grid, read

Ranks = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LinkCost:
    """``alpha`` seconds a message and ``beta`` seconds a byte."""

    alpha: float
    beta: float


#: 200 Gb/s InfiniBand through MPI, and shared memory or NVLink within a node.
NETWORK = LinkCost(1.5e-6, 1 / 25e9)
NODE = LinkCost(0.5e-6, 1 / 150e9)


@dataclass(frozen=True)
class Topology:
    """Model of a network: one switch that connects everybody with everybody, unless a subclass
    says otherwise."""

    port: LinkCost = NETWORK

    def alpha(self, source: Ranks, target: Ranks) -> Seconds:
        """Latency of each message."""
        return np.full(len(source), self.port.alpha)

    def beta(self, source: Ranks, target: Ranks) -> Seconds:
        """Seconds a byte of each message that has its way to itself."""
        return np.full(len(source), self.port.beta)

    def shared(self, source: Ranks, target: Ranks) -> Iterator[tuple[Ranks, float]]:
        """For each kind of link: which ones a message uses (a column; -1: none), seconds a byte."""
        return iter(())


@dataclass(frozen=True)
class FatTree(Topology):
    """Leaf switches of ``leaf`` ranks whose uplinks carry ``1 / taper`` of what their ranks can."""

    leaf: int = 32
    taper: float = 2.0

    def shared(self, source: Ranks, target: Ranks) -> Iterator[tuple[Ranks, float]]:
        return _uplinks(source, target, self.leaf, self.port.beta * self.taper / self.leaf)


@dataclass(frozen=True)
class Cluster(Topology):
    """Nodes of ``per_node`` ranks: fast links within, ``adapters`` network ports to leave by."""

    per_node: int = 8
    adapters: int = 1
    inside: LinkCost = NODE

    def alpha(self, source: Ranks, target: Ranks) -> Seconds:
        return np.where(self._within(source, target), self.inside.alpha, self.port.alpha)

    def beta(self, source: Ranks, target: Ranks) -> Seconds:
        return np.where(self._within(source, target), self.inside.beta, self.port.beta)

    def shared(self, source: Ranks, target: Ranks) -> Iterator[tuple[Ranks, float]]:
        return _uplinks(source, target, self.per_node, self.port.beta / self.adapters)

    def _within(self, source: Ranks, target: Ranks) -> npt.NDArray[np.bool_]:
        """Whether each message stays in its node."""
        return source // self.per_node == target // self.per_node


#: Seconds a byte of one NVLink 2, and of the PCIe bus that pairs without one share.
NVLINK = 1 / 25e9
PCIE = 1 / 10e9


@dataclass(frozen=True, eq=False)
class Islands(Cluster):
    """Nodes whose ranks are joined by unequal links, with ``adapters`` network ports to leave by.

    Attributes:
        lanes: links of one node, as the patterns of :mod:`collectives.algorithms.links` give them;
            two ranks without a link use the bus of the node.
        lane, bus: seconds a byte of a lane and of the bus.
    """

    adapters: int = 4
    lanes: Lanes = field(default_factory=lambda: dgx1(8))
    lane: float = NVLINK
    bus: float = PCIE

    def beta(self, source: Ranks, target: Ranks) -> Seconds:
        joined = self._joined(source, target)
        direct = np.where(joined > 0, self.lane / np.maximum(joined, 1), self.bus)
        return np.where(self._within(source, target), direct, self.port.beta)

    def shared(self, source: Ranks, target: Ranks) -> Iterator[tuple[Ranks, float]]:
        yield from super().shared(source, target)
        by_bus = self._within(source, target) & (self._joined(source, target) == 0)
        yield np.where(by_bus, source // self.per_node, -1)[None], self.bus

    def _joined(self, source: Ranks, target: Ranks) -> Ranks:
        """Lanes between the places of each message's ranks in their nodes."""
        return self.lanes[source % self.per_node, target % self.per_node]


@dataclass(frozen=True, eq=False)
class Wired(Topology):
    """Ranks that unequal links join; a message to another rank goes by the fewest of them.

    Attributes:
        lanes: links, as :mod:`collectives.algorithms.links` has them; ``port`` is the cost of a
            lane.
    """

    lanes: Lanes = field(default_factory=lambda: dgx1(8))

    def alpha(self, source: Ranks, target: Ranks) -> Seconds:
        return self.port.alpha * (1 + 0.1 * np.maximum(self._far[source, target] - 1, 0))

    def beta(self, source: Ranks, target: Ranks) -> Seconds:
        hops = [self.lanes[at, to] for at, to in self._hops(source, target)]
        most = self.lanes.max()
        return self.port.beta / np.min([np.where(wide > 0, wide, most) for wide in hops], axis=0)

    def shared(self, source: Ranks, target: Ranks) -> Iterator[tuple[Ranks, float]]:
        hops = [(at * len(self.lanes) + to, at, to) for at, to in self._hops(source, target)]
        for width in np.unique(self.lanes[self.lanes > 0]).tolist():
            columns = [np.where(self.lanes[at, to] == width, link, -1) for link, at, to in hops]
            yield np.stack(columns), self.port.beta / width

    @cached_property
    def _far(self) -> Seconds:
        return distances(self.lanes)

    def _hops(self, source: Ranks, target: Ranks) -> Iterator[tuple[Ranks, Ranks]]:
        """Each message's next link, until the last one is there; then both ends are its target."""
        at = source
        for _ in range(max(1, int(self._far[source, target].max(initial=1)))):
            nearer = np.where(self.lanes[at] > 0, self._far[target], np.inf)
            to = np.where(at == target, target, nearer.argmin(axis=1))
            yield at, to
            at = to


def _uplinks(
    source: Ranks, target: Ranks, group: int, beta: float
) -> Iterator[tuple[Ranks, float]]:
    """Links by which messages leave and enter groups of ``group`` ranks, and seconds a byte."""
    up, down = source // group, target // group
    for link in (up, down):
        yield np.where(up != down, link, -1)[None], beta


@dataclass(frozen=True)
class Torus(Topology):
    """A grid closed in every dimension; messages go the short way, one axis after the other."""

    shape: tuple[int, ...] = (8, 8)

    def alpha(self, source: Ranks, target: Ranks) -> Seconds:
        hops = sum(np.abs(steps) for _, _, steps in self._ways(source, target))
        return self.port.alpha * (1 + 0.1 * np.maximum(hops - 1, 0))

    def shared(self, source: Ranks, target: Ranks) -> Iterator[tuple[Ranks, float]]:
        for axis, at, steps in self._ways(source, target):
            hops = [np.full(len(source), -1)]
            for hop in range(int(np.abs(steps).max(initial=0))):
                place = list(at)
                place[axis] = (at[axis] + np.sign(steps) * hop) % self.shape[axis]
                here = np.ravel_multi_index(tuple(place), self.shape)
                hops.append(np.where(hop < np.abs(steps), 2 * here + (steps > 0), -1))
            yield np.stack(hops), self.port.beta  # one link each way from every place

    def _ways(self, source: Ranks, target: Ranks) -> Iterator[tuple[int, list[Ranks], Ranks]]:
        """For each axis: where messages are when they turn into it, how far along it they go."""
        at = list(np.unravel_index(source, self.shape))
        to = np.unravel_index(target, self.shape)
        for axis, length in enumerate(self.shape):
            steps = (to[axis] - at[axis]) % length
            steps = np.where(steps > length // 2, steps - length, steps)
            yield axis, list(at), steps
            at[axis] = to[axis]


#: Topologies by their names on the command line, as functions of the number of ranks.
TOPOLOGIES: dict[str, Callable[[int, LinkCost], Topology]] = {
    "flat": lambda size, port: Topology(port),
    "fat-tree": lambda size, port: FatTree(port),
    "cluster": lambda size, port: Cluster(port),
    "dgx1": lambda size, port: Islands(port),
    "ring": lambda size, port: Torus(port, shape=(size,)),
    "torus2d": lambda size, port: Torus(port, shape=grid(size, 2)),
    "torus3d": lambda size, port: Torus(port, shape=grid(size, 3)),
}


def build(name: str, size: int, port: LinkCost = NETWORK) -> Topology:
    """The topology ``name``, or that of a file of links, over ``size`` ranks; raises ``ValueError``
    for one that is not."""
    if name.endswith(".txt"):
        return Wired(port, among(read(Path(name)), size))
    if name not in TOPOLOGIES:
        raise ValueError(f"no topology {name!r}; there are {', '.join(TOPOLOGIES)}")
    return TOPOLOGIES[name](size, port)
