"""The trees behind schedules, and a picture for every algorithm."""

import pytest

from collectives.__main__ import main
from collectives.algorithms import ALGORITHMS, build
from collectives.algorithms.double_binary_tree import trees as double_trees
from collectives.analysis.structure import trees


def test_the_binomial_tree():
    wanted = {1: 0, 2: 0, 3: 2, 4: 0, 5: 4, 6: 4, 7: 6}
    for collective in ("allreduce", "broadcast", "reduce"):
        assert trees(build(collective, "binomial_tree", 8)) == {0: wanted}


@pytest.mark.parametrize("p", [2, 5, 8])
def test_the_double_binary_tree(p):
    found = trees(build("allreduce", "double_binary_tree", p))
    for rank in range(p):
        for tree in double_trees(rank, p):
            assert found[tree.chunk].get(rank) == tree.parent


@pytest.mark.parametrize("name", ["ring", "butterfly", "swing", "direct", "circulant"])
def test_what_is_no_tree(name):
    assert trees(build("allreduce", name, 8)) == {}


@pytest.mark.slow
def test_a_picture_for_every_algorithm(tmp_path, capsys):
    assert main(["draw", "all", "-n", "4", "-o", str(tmp_path)]) == 0
    capsys.readouterr()
    for algorithm in ALGORITHMS:
        path = tmp_path / f"{algorithm.collective}_{algorithm.name}_4.png"
        assert path.read_bytes().startswith(b"\x89PNG")
