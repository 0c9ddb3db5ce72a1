"""Spanning trees: the most trees that the links between the ranks can carry.

Where links differ, a ring is as slow as the slowest on its way.  Packed trees use all lanes of all
links at once: a tree has one chunk of the buffer for each lane of its links.

Wang, Venkataraman, Phanishayee, Thelin, Devanur, Stoica: "Blink: fast and generic collectives for
distributed ML", MLSys 2020.
"""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from hashlib import sha256
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt

from collectives.algorithms.algorithm import Algorithm
from collectives.algorithms.links import Lanes, among, checked, named, read
from collectives.algorithms.packing import Tree, pack
from collectives.algorithms.tree import Shares, fall, rise
from collectives.contracts import contract
from collectives.errors import UnknownAlgorithm
from collectives.schedule import Copy, Round, Schedule, recvbuf, sendbuf

#: Trees over more ranks would take minutes to pack.
MOST_RANKS = 512


def allreduce(rank: int, size: int, trees: Sequence[Tree]) -> Iterator[Round]:
    """Reduce each share up its tree to the root, then broadcast it down.

    Cost: twice the height of the highest tree in rounds; of the buffer, k chunks in all, each lane
    of a link carries at most one up and one down.
    """
    shares = _shares(rank, trees)
    if size == 1:
        yield (Copy(recvbuf[0], sendbuf[0]),)
    yield from rise(shares, _height(trees))
    yield from fall(shares, _height(trees))


def broadcast(rank: int, size: int, root: int, trees: Sequence[Tree]) -> Iterator[Round]:
    """Each share down its tree.

    Cost: a copy at the root, and the height of the highest tree in rounds; each lane of a link
    carries at most one of the k chunks.
    """
    everything = slice(0, _chunks(trees))
    yield (Copy(recvbuf[everything], sendbuf[everything]),) if rank == root else ()
    yield from fall(_shares(rank, trees), _height(trees))


def schedule(links: npt.ArrayLike, collective: str = "allreduce", root: int = 0) -> Schedule:
    """An all-reduce or a broadcast over the ranks that ``links`` join.

    >>> print(schedule([[0, 2, 1], [2, 0, 1], [1, 1, 0]]))
    allreduce spanning_trees on 3 ranks

    Args:
        links: shape (ranks, ranks), whole numbers: the bandwidth between each two, in any unit.
            Symmetric; 0 for ranks that are not joined.  The diagonal does not matter.
        collective: ``"allreduce"`` or ``"broadcast"``.
        root: root of the trees and of the broadcast.

    Raises:
        ValueError: for links that are not such a matrix, or that do not reach every rank.
        UnknownAlgorithm: for another collective, or more than ``MOST_RANKS`` ranks.
    """
    lanes = _lanes(links)
    size = len(lanes)
    if collective not in ("allreduce", "broadcast"):
        raise UnknownAlgorithm(f"spanning trees do allreduce and broadcast, not {collective}")
    if not 0 <= root < size:
        raise ValueError(f"root {root} is not one of the {size} ranks that the links join")
    trees = _trees(lanes, root)
    if collective == "allreduce":
        generate = partial(allreduce, size=size, trees=trees)
    else:
        generate = partial(broadcast, size=size, root=root, trees=trees)
    at = root if contract(collective).rooted else 0
    return Schedule(collective, "spanning_trees", size, _chunks(trees), 0, True, generate, at)


def over(links: npt.ArrayLike, name: str, collective: str = "allreduce") -> Algorithm:
    """An algorithm by :func:`schedule`, to be registered; on fewer ranks, over the first ones.

    Raises:
        ValueError, UnknownAlgorithm: as :func:`schedule`.
    """
    lanes = _lanes(links)

    def rooted(size: int, root: int) -> Schedule:
        return schedule(among(lanes, size), collective, root)

    compose = rooted if contract(collective).rooted else lambda size: rooted(size, 0)
    summary = f"the most trees that the links between {len(lanes)} ranks carry"
    return Algorithm(collective, name, None, summary, "Wang et al. 2020", compose=compose)


def of_file(path: Path) -> list[Algorithm]:
    """Algorithms :func:`over` the links of a file, whose name has a digest of them."""
    lanes = read(path)
    digest = sha256(lanes.tobytes()).hexdigest()[:6]
    name = re.sub(r"\W", "_", f"spanning_trees_{path.stem}_{digest}")
    return [over(lanes, name, collective) for collective in ("allreduce", "broadcast")]


def named_allreduce(rank: int, size: int, links: str = "complete") -> Iterator[Round]:
    """:func:`allreduce` over the trees of a machine that ``links`` names."""
    return allreduce(rank, size, _named(links, size, 0))


def named_broadcast(rank: int, size: int, root: int, links: str = "complete") -> Iterator[Round]:
    """:func:`broadcast` over the trees of a machine that has a name."""
    return broadcast(rank, size, root, _named(links, size, root))


def named_chunks(size: int, links: str = "complete") -> int:
    """Chunks of the buffer: Edmonds' bound, which is the same for every root."""
    return _chunks(_named(links, size, 0))


def _shares(rank: int, trees: Sequence[Tree]) -> Shares:
    ends = accumulate(tree.weight for tree in trees)
    return [(slice(end - tree.weight, end), tree.places[rank]) for tree, end in zip(trees, ends)]


def _chunks(trees: Sequence[Tree]) -> int:
    return sum(tree.weight for tree in trees)


def _height(trees: Sequence[Tree]) -> int:
    return max(tree.height for tree in trees)


@lru_cache(maxsize=256)
def _named(links: str, size: int, root: int) -> list[Tree]:
    _check_size(size)
    return _trees(named(links, size), root)


def _trees(lanes: Lanes, root: int) -> list[Tree]:
    """Packed trees; on one rank, the tree that is the root alone."""
    return pack(lanes // (np.gcd.reduce(lanes, None) or 1), root) or [Tree(1, (0,))]


def _lanes(links: npt.ArrayLike) -> Lanes:
    """Checks a caller's matrix of links."""
    _check_size(len(np.atleast_1d(links)))
    return checked(links)


def _check_size(size: int) -> None:
    if size > MOST_RANKS:
        raise UnknownAlgorithm(
            f"spanning trees are packed for at most {MOST_RANKS} ranks, not {size}; take them "
            "within the nodes, as in leaders:intra=spanning_trees"
        )
