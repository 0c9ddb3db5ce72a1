"""A cluster as the search sees it: what a rank computes and holds, and how fast ranks talk."""

from dataclasses import dataclass, replace
from math import inf
from typing import Any

from collectives.analysis import NETWORK, NODE, LinkCost


@dataclass(frozen=True)
class Machine:
    """Nodes of equal ranks.

    Attributes:
        ranks: number of ranks; neighbours lie in one node.
        per_node: ranks of a node, which share its adapters.
        rate: work that a rank does in a second, in the unit of the layers' costs.
        stream: bytes that a rank reads or writes in a second; infinite: they take no time.
        launch: seconds that a pass of a layer takes besides its work; twice that backward.
        memory: bytes that a rank may use; infinite: no limit.
        inside, network: links between two ranks of a node, and between two nodes.
        adapters: network ports of a node.
        call: seconds of software for a pass of a stage, a message or a collective, whatever its
            size; no computation hides them.
        copying: whether the cores that compute also copy what ranks of a node tell one another, so
            that no computation hides it; a GPU has engines for that.
    """

    ranks: int
    per_node: int
    rate: float
    stream: float = inf
    launch: float = 0.0
    memory: float = inf
    inside: LinkCost = NODE
    network: LinkCost = NETWORK
    adapters: int = 1
    call: float = 0.0
    copying: bool = False

    def hides(self, size: int, stride: int) -> bool:
        """Whether computation hides messages among ``size`` ranks that are ``stride`` apart."""
        return not self.copying or size * stride > self.per_node

    def silent(self) -> "Machine":
        """The machine if communication took no time."""
        free = LinkCost(0.0, 0.0)
        return replace(self, inside=free, network=free, call=0.0)

    def link(self, size: int, stride: int) -> LinkCost:
        """The slowest link of a ring of ``size`` ranks that are ``stride`` apart.

        All ranks between two of them have rings of their own, which share the adapters.
        """
        if size * stride <= self.per_node:
            return self.inside
        rings = max(1.0, min(stride, self.per_node) / self.adapters)
        return LinkCost(self.network.alpha, self.network.beta * rings)

    def scatter(self, nbytes: Any, size: int, stride: int, arrays: Any = 1) -> Any:
        """Seconds of a ring's reduce-scatter, or all-gather, or a pairwise all-to-all, of
        ``nbytes`` in so many ``arrays``."""
        link = self.link(size, stride)
        return (size - 1) * (link.alpha * arrays + link.beta * nbytes / size)
