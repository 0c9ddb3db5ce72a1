"""The links of a modelled network, on which messages take their turns."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.analysis.topology import Topology

#: Part of a message's latency that each takes: its header, the answer, its bytes.
THIRD = 1 / 3


class Links:
    """When messages between ranks begin and end.

    A message takes the latency of its route, and its bytes at the rate of the slowest link; a link
    serves its messages one after the other.
    """

    def __init__(self, network: Topology) -> None:
        self._network = network
        self._free: defaultdict[object, float] = defaultdict(float)
        #: When a header that follows the last bytes is there, by source and target.
        self._there: dict[tuple[int, int], float] = {}
        self._routes: dict[tuple[int, int], tuple[float, list[tuple[Any, float]]]] = {}

    def transfer(self, source: int, target: int, nbytes: int, now: float) -> tuple[float, float]:
        """When the first and the last bytes leave, from ``now`` on; then comes the latency."""
        latency, links = self._route(source, target)
        slowest = max((seconds for _, seconds in links), default=0.0)
        begin = max([now, *(self._free[link] for link, _ in links)])
        for link, seconds in links:
            self._free[link] = begin + nbytes * seconds
        left = begin + nbytes * slowest
        # A small message before may be on its way still, by its whole latency.
        there = self._there.get((source, target), 0.0)
        self._there[source, target] = max(there, left + THIRD * latency)
        return begin, left

    def latency(self, source: int, target: int) -> float:
        """Seconds of a message without bytes."""
        return self._route(source, target)[0]

    def small(self, source: int, target: int, nbytes: int, now: float) -> tuple[float, float]:
        """When a small message begins, and when it is there."""
        begin, left = self.transfer(source, target, nbytes, now)
        there = left + self.latency(source, target)
        self._there[source, target] = there
        return begin, there

    def after(self, source: int, target: int, now: float) -> float:
        """When a header or an answer is there, which goes behind all bytes of its direction."""
        there = now + THIRD * self.latency(source, target)
        return max(there, self._there.get((source, target), there))

    def meeting(self, members: Sequence[int], nbytes: float) -> float:
        """Seconds of a collective of the library itself, of which ``nbytes`` pass a link: a
        binomial tree over the longest route from the first member."""
        rounds = (len(members) - 1).bit_length()
        if not rounds:
            return 0.0
        first = np.full(len(members) - 1, members[0])
        others = np.array(members[1:])
        alpha = float(self._network.alpha(first, others).max())
        return rounds * alpha + nbytes * float(self._network.beta(first, others).max())

    def _route(self, source: int, target: int) -> tuple[float, list[tuple[Any, float]]]:
        """Latency of a route, and the links on it with their seconds a byte."""
        if source == target:
            return 0.0, []
        found = self._routes.get((source, target))
        if found is None:
            ends = np.array([source]), np.array([target])
            beta = float(self._network.beta(*ends)[0])
            links: list[tuple[Any, float]] = [(("out", source), beta), (("in", target), beta)]
            for kind, (used, seconds) in enumerate(self._network.shared(*ends)):
                links += [((kind, int(link)), seconds) for link in used[:, 0] if link >= 0]
            found = self._routes[source, target] = float(self._network.alpha(*ends)[0]), links
        return found
