"""Packing spanning trees: the most trees out of a root that the links can carry at once.

Edmonds ("Edge-disjoint branchings", 1973): directed trees out of a root with weights that add up
to k fit into the links if and only if every other rank can be reached by a flow of k.  So the
greatest k is the smallest of these flows.  Lovasz ("On two minimax theorems in graph theory", 1976)
turned the proof into the algorithm used here: grow a tree, and take no link without which the
remaining trees could not reach some rank.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from collectives.algorithms.links import Lanes
from collectives.algorithms.tree import TreePlace


class Tree:
    """A spanning tree with a weight: how many lanes of each of its links it takes.

    Attributes:
        weight: at least 1.
        parents: each rank's parent; the root's is itself.
        height: height of the root above the lowest leaf.
        places: each rank's place.
    """

    def __init__(self, weight: int, parents: tuple[int, ...]) -> None:
        self.weight = weight
        self.parents = parents

    @property
    def height(self) -> int:
        return max(place.height for place in self.places)

    @cached_property
    def places(self) -> list[TreePlace]:
        children: list[list[int]] = [[] for _ in self.parents]
        for parent, rank in zip(*links_of(self.parents)):
            children[parent].append(rank)
        heights = [0] * len(self.parents)
        order = [rank for rank, parent in enumerate(self.parents) if parent == rank]
        for rank in order:  # from the root downwards, while it grows
            order += children[rank]
        for rank in reversed(order):
            heights[rank] = max((heights[child] + 1 for child in children[rank]), default=0)
        return [
            TreePlace(heights[rank], None if up == rank else up, heights[up], tuple(children[rank]))
            for rank, up in enumerate(self.parents)
        ]


def connectivity(lanes: Lanes, root: int = 0) -> int:
    """Edmonds' bound: the smallest flow from ``root`` to another rank; 0 if one is cut off.

    Links are alike in both directions, so all roots have the same bound.
    """
    least = int(lanes[root].sum())
    for rank in range(len(lanes)):
        if rank != root:
            least = flow(lanes, root, rank, least)
    return least


def pack(lanes: Lanes, root: int = 0) -> list[Tree]:
    """Spanning trees out of ``root`` whose weights add up to :func:`connectivity`.

    No link is used by trees of more weight than it has lanes, in either direction.  Each tree is
    grown breadth first, so that it is low, and given the most weight that leaves enough for those
    after it, so that they are few.

    Cost: for each tree, a flow for each link at worst.
    """
    missing = connectivity(lanes, root)
    spare = lanes.copy()
    trees = []
    while missing:
        parents = _grow(spare, root, missing)
        weight = _most(spare, root, missing, parents)
        trees.append(Tree(weight, parents))
        spare[links_of(parents)] -= weight
        missing -= weight
    return trees


def _grow(spare: Lanes, root: int, missing: int) -> tuple[int, ...]:
    """The parents of a tree without which every rank can be reached by ``missing - 1``.

    A link that was refused once stays refused: the tree only takes more away.
    """
    left = spare.copy()
    parents = {root: root}
    reached = [root]
    for parent in reached:  # breadth first: it grows at its end
        for child in np.argsort(-left[parent], kind="stable").tolist():  # the widest first
            if child in parents or not left[parent, child]:
                continue
            left[parent, child] -= 1
            if flow(left, root, child, missing - 1) == missing - 1:
                parents[child] = parent
                reached.append(child)
            else:
                left[parent, child] += 1
    return tuple(parents[rank] for rank in range(len(spare)))


def links_of(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Parents and children of all links of a tree, to index a matrix with."""
    pairs = [(parent, rank) for rank, parent in enumerate(parents) if parent != rank]
    return [parent for parent, _ in pairs], [child for _, child in pairs]


def _most(spare: Lanes, root: int, missing: int, parents: Sequence[int]) -> int:
    """The greatest weight of a tree that leaves enough flow to every rank for the others."""
    links = links_of(parents)

    def leaves_enough(weight: int) -> bool:
        left = spare.copy()
        left[links] -= weight
        return connectivity(left, root) >= missing - weight

    least, most = 1, min(missing, int(spare[links].min()))
    while least < most:  # the capacity of each cut falls linearly with the weight
        middle = (least + most + 1) // 2
        least, most = (middle, most) if leaves_enough(middle) else (least, middle - 1)
    return least


def flow(lanes: Lanes, source: int, target: int, enough: int) -> int:
    """The greatest flow from ``source`` to ``target``, but no more than ``enough``.

    Edmonds and Karp's shortest augmenting paths.  The first ones, of one and two links, share
    nothing and are found all at once; where every rank is linked with every other, they do.
    """
    through = np.minimum(lanes[source], lanes[:, target])
    found = int(lanes[source, target] + through.sum())
    if found >= enough or min(lanes[source].sum(), lanes[:, target].sum()) == found:
        return min(found, enough)
    left = lanes.copy()
    left[target, source] += left[source, target]
    left[source, target] = 0
    left[source] -= through
    left[:, source] += through
    left[:, target] -= through
    left[target] += through
    while found < enough:
        path = _shortest(left, source, target)
        if not path:
            break
        starts, ends = path[:-1], path[1:]
        more = min(enough - found, int(left[starts, ends].min()))
        left[starts, ends] -= more
        left[ends, starts] += more
        found += more
    return found


def _shortest(left: Lanes, source: int, target: int) -> list[int]:
    """The ranks on a shortest way along links that have lanes left; none if there is no way."""
    before = np.full(len(left), -1)
    before[source] = source
    reached = [source]
    for rank in reached:
        new = np.flatnonzero((left[rank] > 0) & (before < 0))
        before[new] = rank
        reached += new.tolist()
        if before[target] >= 0:
            path = [target]
            while path[-1] != source:
                path.append(int(before[path[-1]]))
            return path[::-1]
    return []
