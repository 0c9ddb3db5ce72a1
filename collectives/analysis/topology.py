"""Networks for the simulator: which shared links the messages of a round go through."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from collectives.algorithms.links import Lanes, dgx1, grid

Ranks = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Link:
    """``alpha`` seconds a message and ``beta`` seconds a byte."""

    alpha: float
    beta: float


#: 200 Gb/s InfiniBand through MPI, and shared memory or NVLink within a node.
NETWORK = Link(1.5e-6, 1 / 25e9)
NODE = Link(0.5e-6, 1 / 150e9)


class Topology(Protocol):
    """Model of a network, as the simulator uses it."""

    def alpha(self, source: Ranks, target: Ranks) -> Seconds:
        """Latency of each message."""

    def beta(self, source: Ranks, target: Ranks) -> Seconds:
        """Seconds a byte of each message that has its way to itself."""

    def shared(self, source: Ranks, target: Ranks) -> Iterator[tuple[Ranks, float]]:
        """For each kind of link: which ones a message uses (a column; -1: none), seconds a byte."""


@dataclass(frozen=True)
class Flat:
    """One switch that connects everybody with everybody."""

    port: Link = NETWORK

    def alpha(self, source: Ranks, target: Ranks) -> Seconds:
        return np.full(len(source), self.port.alpha)

    def beta(self, source: Ranks, target: Ranks) -> Seconds:
        return np.full(len(source), self.port.beta)

    def shared(self, source: Ranks, target: Ranks) -> Iterator[tuple[Ranks, float]]:
        return iter(())


@dataclass(frozen=True)
class FatTree(Flat):
    """Leaf switches of ``leaf`` ranks whose uplinks carry ``1 / taper`` of what their ranks can."""

    leaf: int = 32
    taper: float = 2.0

    def shared(self, source: Ranks, target: Ranks) -> Iterator[tuple[Ranks, float]]:
        up, down = source // self.leaf, target // self.leaf
        leaves = up != down
        beta = self.port.beta * self.taper / self.leaf
        yield np.where(leaves, up, -1)[None], beta
        yield np.where(leaves, down, -1)[None], beta


@dataclass(frozen=True)
class Cluster(Flat):
    """Nodes of ``per_node`` ranks: fast links within, ``adapters`` network ports to leave by."""

    per_node: int = 8
    adapters: int = 1
    inside: Link = NODE

    def alpha(self, source: Ranks, target: Ranks) -> Seconds:
        within = source // self.per_node == target // self.per_node
        return np.where(within, self.inside.alpha, self.port.alpha)

    def beta(self, source: Ranks, target: Ranks) -> Seconds:
        within = source // self.per_node == target // self.per_node
        return np.where(within, self.inside.beta, self.port.beta)

    def shared(self, source: Ranks, target: Ranks) -> Iterator[tuple[Ranks, float]]:
        up, down = source // self.per_node, target // self.per_node
        leaves = up != down
        yield np.where(leaves, up, -1)[None], self.port.beta / self.adapters
        yield np.where(leaves, down, -1)[None], self.port.beta / self.adapters


#: Seconds a byte of one NVLink 2, and of the PCIe bus that pairs without one share.
NVLINK = 1 / 25e9
PCIE = 1 / 10e9


@dataclass(frozen=True, eq=False)
class Islands(Flat):
    """Nodes whose ranks are joined by unequal links, with ``adapters`` network ports to leave by.

    Attributes:
        lanes: as the patterns of :mod:`collectives.algorithms.links` give it, for one node; two
            ranks without a link use the bus of the node.
        lane, bus: seconds a byte of each.
    """

    lanes: Lanes = field(default_factory=lambda: dgx1(8))
    lane: float = NVLINK
    bus: float = PCIE
    adapters: int = 4
    inside: Link = NODE

    @property
    def per_node(self) -> int:
        return len(self.lanes)

    def alpha(self, source: Ranks, target: Ranks) -> Seconds:
        within = source // self.per_node == target // self.per_node
        return np.where(within, self.inside.alpha, self.port.alpha)

    def beta(self, source: Ranks, target: Ranks) -> Seconds:
        within, joined = self._joined(source, target)
        direct = np.where(joined > 0, self.lane / np.maximum(joined, 1), self.bus)
        return np.where(within, direct, self.port.beta)

    def shared(self, source: Ranks, target: Ranks) -> Iterator[tuple[Ranks, float]]:
        within, joined = self._joined(source, target)
        up, down = source // self.per_node, target // self.per_node
        yield np.where(within, -1, up)[None], self.port.beta / self.adapters
        yield np.where(within, -1, down)[None], self.port.beta / self.adapters
        yield np.where(within & (joined == 0), up, -1)[None], self.bus

    def _joined(self, source: Ranks, target: Ranks) -> tuple[npt.NDArray[np.bool_], Ranks]:
        """Whether each message stays in its node, and the links that it has there."""
        n = self.per_node
        return source // n == target // n, self.lanes[source % n, target % n]


@dataclass(frozen=True)
class Torus(Flat):
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


@dataclass(frozen=True, eq=False)
class Wired(Flat):
    """Links between some pairs of ranks, of one lane or more; ``port`` is what a lane can do.

    Attributes:
        lanes: shape (ranks, ranks), as the patterns of :mod:`collectives.algorithms.links` give it.
        detour: how many times slower than a lane it goes where there is no link (PCIe and host).
    """

    lanes: npt.NDArray[np.int64] = field(default_factory=lambda: np.ones((2, 2), np.int64))
    detour: float = 4.0

    def beta(self, source: Ranks, target: Ranks) -> Seconds:
        lanes = self.lanes[source, target]
        return self.port.beta * np.where(lanes > 0, 1 / np.maximum(lanes, 1), self.detour)

    def shared(self, source: Ranks, target: Ranks) -> Iterator[tuple[Ranks, float]]:
        link, lanes = source * len(self.lanes) + target, self.lanes[source, target]
        for many in range(1, int(lanes.max(initial=0)) + 1):
            yield np.where(lanes == many, link, -1)[None], self.port.beta / many


#: Topologies by their names on the command line, as functions of the number of ranks.
TOPOLOGIES: dict[str, Callable[[int, Link], Topology]] = {
    "flat": lambda size, port: Flat(port),
    "fat-tree": lambda size, port: FatTree(port),
    "cluster": lambda size, port: Cluster(port),
    "dgx1": lambda size, port: Islands(port),
    "ring": lambda size, port: Torus(port, shape=(size,)),
    "torus2d": lambda size, port: Torus(port, shape=grid(size, 2)),
    "torus3d": lambda size, port: Torus(port, shape=grid(size, 3)),
}


def build(name: str, size: int, port: Link = NETWORK) -> Topology:
    """The topology ``name`` over ``size`` ranks; raises ``ValueError`` for one that is not."""
    if name not in TOPOLOGIES:
        raise ValueError(f"no topology {name!r}; there are {', '.join(TOPOLOGIES)}")
    return TOPOLOGIES[name](size, port)
