"""Layouts, the drawn grid, and the choice of an algorithm."""

import os
from itertools import pairwise
from pathlib import Path

import pytest

from collectives.algorithms import build
from collectives.analysis.grid import grid
from collectives.execution.messages import Layout
from collectives.schedule import Chunk

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.mark.parametrize("count", [0, 1, 3, 7, 8, 29])
@pytest.mark.parametrize("chunks", [1, 2, 3, 8])
def test_chunks_cover_a_block_and_differ_by_one_item(count, chunks):
    layout = Layout.even(count, 2, chunks)
    bounds = [layout.offset(i) for i in range(2 * chunks + 1)]
    lengths = [b - a for a, b in pairwise(bounds)]
    assert (bounds[0], bounds[chunks], bounds[-1]) == (0, count, 2 * count)
    assert max(lengths) - min(lengths) <= 1
    assert layout.items(Chunk("recvbuf", 0, chunks)) == slice(0, count)


@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize("algorithm", ["ring", "double_binary_tree", "butterfly"])
def test_the_grid_is_as_it_was(algorithm, size):
    """``UPDATE_GOLDEN=1 pytest`` rewrites the pictures; look at what changed."""
    path = GOLDEN / f"allreduce_{algorithm}_{size}.txt"
    drawn = grid(build("allreduce", algorithm, size)) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(drawn)
    assert drawn == path.read_text()
