"""Machines by their direct links: how many lanes of equal bandwidth join each two ranks."""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from collectives.errors import UnknownAlgorithm

#: ``lanes[a, b]`` of the link from rank a to rank b; symmetric, as links work in both directions.
Lanes = npt.NDArray[np.int64]

#: NVLinks of a DGX-1 with V100s: two squares with their diagonals and, between them, four edges.
_DGX1 = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (1, 2): 2, (1, 3): 1, (2, 3): 2,
    (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2,
    (0, 4): 2, (1, 5): 2, (2, 6): 1, (3, 7): 1,
}  # fmt: skip


def complete(size: int) -> Lanes:
    """A lane between every two ranks, as through one switch."""
    return np.ones((size, size), np.int64) - np.eye(size, dtype=np.int64)


def ring(size: int) -> Lanes:
    """A lane from each rank to the next."""
    return _joined(size, ((rank, (rank + 1) % size) for rank in range(size)))


def torus(size: int) -> Lanes:
    """The most even grid of rows and columns, closed in both; row by row."""
    rows, columns = grid(size, 2)
    if rows == 1 and size > 3:
        raise UnknownAlgorithm(
            f"links=torus: {size} ranks make no grid of more than one row; take links=ring"
        )
    places = np.arange(size).reshape(rows, columns)
    down, right = np.roll(places, -1, 0), np.roll(places, -1, 1)
    whole = places.ravel().tolist()
    return _joined(size, [*zip(whole, down.ravel().tolist()), *zip(whole, right.ravel().tolist())])


def dgx1(size: int) -> Lanes:
    """The eight GPUs of a DGX-1 in their hybrid cube mesh: links of one and of two NVLinks."""
    if size != 8:
        raise UnknownAlgorithm(
            f"links=dgx1 has 8 ranks, not {size}; take links=complete, or give "
            "spanning_trees.schedule the links between yours"
        )
    return _joined(8, (pair for pair, lanes in _DGX1.items() for _ in range(lanes)))


def _joined(size: int, pairs: Iterable[tuple[int, int]]) -> Lanes:
    """A lane for each pair; two that join the same ranks add up."""
    lanes = np.zeros((size, size), np.int64)
    for a, b in pairs:
        if a != b:
            lanes[a, b] += 1
            lanes[b, a] += 1
    return lanes


#: The machines that have a name, as functions of the number of ranks.
PATTERNS: dict[str, Callable[[int], Lanes]] = {
    "complete": complete,
    "ring": ring,
    "torus": torus,
    "dgx1": dgx1,
}


def named(pattern: str, size: int) -> Lanes:
    """The links of ``pattern`` between ``size`` ranks, in the smallest whole numbers.

    Raises:
        UnknownAlgorithm: there is no such pattern at this size.
    """
    if pattern not in PATTERNS:
        raise UnknownAlgorithm(f"no links {pattern!r}; there are {', '.join(PATTERNS)}")
    return PATTERNS[pattern](size)


def read(path: Path) -> Lanes:
    """The links of a file of whole numbers, a row for each rank; :func:`checked`.

    Raises:
        UnknownAlgorithm: it cannot be read, or is no such matrix.
    """
    try:
        return checked(np.loadtxt(path, ndmin=2))
    except (OSError, ValueError) as error:
        raise UnknownAlgorithm(f"{path} has no links between ranks: {error}") from error


def checked(links: npt.ArrayLike) -> Lanes:
    """A caller's matrix of links, with a diagonal of 0; ValueError: it cannot be."""
    given = np.array(links, float)
    if given.ndim != 2 or given.shape[0] != given.shape[1] or not given.size:
        raise ValueError(f"links are a square matrix, not of shape {given.shape}")
    lanes = np.nan_to_num(given, nan=-1.0).clip(-1, 1 << 53).astype(np.int64)  # sums fit, too
    np.fill_diagonal(lanes, 0)
    np.fill_diagonal(given, 0)
    if (lanes != given).any() or (lanes < 0).any():
        raise ValueError("links are whole numbers, 0 or more; choose a unit in which they are")
    if (lanes != lanes.T).any():
        a, b = np.argwhere(lanes != lanes.T)[0]
        raise ValueError(
            f"links are symmetric, but {lanes[a, b]} from rank {a} to {b} and {lanes[b, a]} back"
        )
    if np.isinf(distances(lanes)).any():
        raise ValueError("these links do not join all ranks; give each a way to every other")
    return lanes


def distances(lanes: Lanes) -> npt.NDArray[np.float64]:
    """The fewest links from each rank to each other; infinity where there is no way."""
    found = np.where(lanes > 0, 1.0, np.inf)
    np.fill_diagonal(found, 0)
    for by in range(len(lanes)):
        np.minimum(found, found[:, by, None] + found[None, by], out=found)
    return found


def among(lanes: Lanes, size: int) -> Lanes:
    """The links between the first ``size`` ranks.

    Raises:
        UnknownAlgorithm: there are fewer ranks, or no way between some of them.
    """
    first = lanes[:size, :size]
    if size > len(lanes) or np.isinf(distances(first)).any():
        raise UnknownAlgorithm(f"these links do not join {size} ranks, but {len(lanes)}")
    return first


def grid(size: int, dimensions: int) -> tuple[int, ...]:
    """The most even shape of ``size`` places.

    >>> grid(64, 3), grid(12, 2)
    ((4, 4, 4), (3, 4))
    """
    if dimensions == 1:
        return (size,)
    side = round(size ** (1 / dimensions))
    while side > 1 and size % side:
        side -= 1
    return (side, *grid(size // side, dimensions - 1))
