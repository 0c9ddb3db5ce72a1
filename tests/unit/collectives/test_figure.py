"""The drawn schedule: what it shows of many rounds, ranks and chunks, and the trees behind it."""

import os
from itertools import combinations
from pathlib import Path

import pytest

from collectives.__main__ import main
from collectives.algorithms import ALGORITHMS, build
from collectives.algorithms.double_binary_tree import trees as double_trees
from collectives.analysis.figure import columns, figure, moves, shade
from collectives.analysis.grid import grid
from collectives.analysis.structure import trees
from tests.cases import slow_case

GOLDEN = Path(__file__).parents[2] / "golden"


def test_equal_rounds_in_a_row_are_drawn_once():
    many = "12 more\nalike"
    assert columns(moves(build("allreduce", "ring", 16))) == [0, 1, many, 14, 15, 16, many, 29]
    assert columns(moves(build("allreduce", "ring", 5))) == list(range(8))
    # The rounds of a swing go to ranks at other distances.
    assert columns(moves(build("allreduce", "swing", 32))) == list(range(10))


@pytest.mark.parametrize("ranks", [4, 8, 16, 32])
def test_each_chunk_has_a_colour_of_its_own(ranks):
    schedule = build("allreduce", "ring", ranks)
    shades = [shade(schedule, chunk) for chunk in range(ranks)]
    assert all(0 <= part <= 1 for colour in shades for part in colour)
    assert all(a != b for a, b in combinations(shades, 2))


@pytest.mark.parametrize(
    ("algorithm", "ranks", "told"),
    [
        ("ring", 8, "14 messages in a row, 1.75 buffers sent by the busiest rank<"),
        slow_case("ring", 16, "the messages of rank 0 in colour"),
        slow_case("direct", 16, "only the messages of rank 0 are drawn"),
        ("hierarchical:local=2", 4, "free: the ranks"),
    ],
)
def test_an_svg_says_what_it_leaves_out(tmp_path, algorithm, ranks, told):
    """Its words are text, and drawing it again gives the same file."""
    one, two = tmp_path / "1.svg", tmp_path / "2.svg"
    for path in (one, two):
        figure(build("allreduce", algorithm, ranks), path)
    assert told in one.read_text()
    assert "receive and reduce" in one.read_text()
    assert one.read_bytes() == two.read_bytes()


def test_receives_of_one_rank_stand_apart(tmp_path):
    figure(build("allreduce", "direct", 4), tmp_path / "a.svg")
    lines = (tmp_path / "a.svg").read_text().splitlines()
    places = [line.split("transform=")[1].split(">")[0] for line in lines if ">r0<" in line]
    assert len(places) == len(set(places)) == 6


def test_trees_are_found_in_schedules():
    wanted = {1: 0, 2: 0, 3: 2, 4: 0, 5: 4, 6: 4, 7: 6}
    for collective in ("allreduce", "broadcast", "reduce"):
        assert trees(build(collective, "binomial_tree", 8)) == {0: wanted}
    for p in (2, 5, 8):
        found = trees(build("allreduce", "double_binary_tree", p))
        for rank in range(p):
            for chunk, tree in enumerate(double_trees(rank, p)):
                assert found[chunk].get(rank) == tree.parent


@pytest.mark.slow
def test_a_picture_for_every_algorithm(tmp_path, capsys):
    assert main(["draw", "all", "-n", "4", "-o", str(tmp_path)]) == 0
    capsys.readouterr()
    for algorithm in ALGORITHMS:
        path = tmp_path / f"{algorithm.collective}_{algorithm.name}_4.png"
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize("algorithm", ["ring", "double_binary_tree", "butterfly"])
def test_the_grid_is_as_it_was(algorithm, size):
    """``UPDATE_GOLDEN=1 pytest`` rewrites the pictures; look at what changed."""
    path = GOLDEN / f"allreduce_{algorithm}_{size}.txt"
    drawn = grid(build("allreduce", algorithm, size)) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(drawn)
    assert drawn == path.read_text()
