"""Packed spanning trees: Edmonds' bound, the load of every link, and what it is worth."""

from itertools import permutations

import numpy as np
import pytest

from collectives.__main__ import main
from collectives.algorithms import build, spanning_trees
from collectives.algorithms.links import named
from collectives.algorithms.packing import connectivity, links_of, pack
from collectives.analysis.claims import digest
from collectives.analysis.simulate import Machine, simulate
from collectives.analysis.topology import LinkCost, Wired
from collectives.analysis.user_code import resolve
from collectives.analysis.verify import verify
from collectives.errors import UnknownAlgorithm
from collectives.schedule import Send
from tests.cases import mostly_slow

LANE = LinkCost(1e-6, 1 / 25e9)
HBM = 3 / 900e9  # a V100 reads two numbers and writes one
M = 96 << 20


def drawn(seed, most=4):
    """A connected graph of 2 to 8 ranks with links of 0 to ``most`` lanes."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(2, 9))
    while True:
        lanes = np.triu(rng.integers(0, most + 1, (size, size)), 1)
        lanes = lanes + lanes.T
        if connectivity(lanes):
            return lanes


def smallest_cut(lanes):
    """Edmonds' bound from its definition: over all sets of ranks without rank 0."""
    size = len(lanes)
    sides = [[bool(s >> r & 1) for r in range(size)] for s in range(2, 1 << size, 2)]
    return min(lanes[np.ix_(~np.array(side), side)].sum() for side in sides)


def check(lanes, root=0):
    """The trees span, fit into the links, and carry exactly the bound: the factor is 1."""
    trees = pack(lanes, root)
    used = np.zeros_like(lanes)
    for tree in trees:
        assert tree.weight >= 1
        reached = {root}
        for _ in lanes:
            reached |= {r for r, parent in enumerate(tree.parents) if parent in reached}
        assert len(reached) == len(lanes)
        used[links_of(tree.parents)] += tree.weight
    assert (used <= lanes).all()
    assert sum(tree.weight for tree in trees) == connectivity(lanes, root)
    return trees


@pytest.mark.parametrize(
    ("pattern", "sizes", "bound"),
    [
        ("complete", range(2, 20), lambda p: p - 1),
        ("ring", range(2, 20), lambda p: 2),
        ("torus", [4, 6, 9, 16, 30], lambda p: 4),
        ("dgx1", [8], lambda p: 6),
    ],
)
def test_named_links_meet_edmonds_bound(pattern, sizes, bound):
    for size in sizes:
        lanes = named(pattern, size)
        assert sum(tree.weight for tree in check(lanes)) == bound(size)
        assert (lanes == lanes.T).all() and (lanes.sum(axis=0) == bound(size)).all()


@pytest.mark.parametrize("seed", mostly_slow(range(50), range(15)))
def test_drawn_links_meet_edmonds_bound_with_schedules_that_are_proved(seed):
    lanes = drawn(seed)
    assert connectivity(lanes) == smallest_cut(lanes)
    for root in range(len(lanes)):
        assert len(check(lanes, root)) <= np.count_nonzero(lanes)
    for root in (0, len(lanes) - 1):
        for collective in ("allreduce", "broadcast"):
            schedule = spanning_trees.schedule(lanes, collective, root)
            assert schedule.root == (root if collective == "broadcast" else 0)
            verify(schedule)
            verify(schedule, in_place=True)
            for rank in range(len(lanes)):
                steps = [step for steps in schedule.rounds(rank) for step in steps]
                assert all(lanes[rank, step.peer] for step in steps if isinstance(step, Send))


def test_weights_are_shares_of_the_buffer():
    """Wide links give one heavy tree each, not many light ones; the unit does not matter."""
    lanes = np.array([[0, 200, 100], [200, 0, 100], [100, 100, 0]])
    assert connectivity(lanes) == 200
    assert len(check(lanes)) == 2
    assert spanning_trees.schedule(lanes).chunks == 2
    assert spanning_trees.schedule(lanes / 4.0).chunks == 2


def rings(lanes):
    """All ways to put rank 0 and the others into a ring of links."""
    for order in permutations(range(1, len(lanes))):
        way = (0, *order)
        if all(lanes[a, b] for a, b in zip(way, (*order, 0))):
            yield way


def test_trees_beat_every_ring_on_dgx1():
    lanes = named("dgx1", 8)

    def seconds(algorithm, order=range(8)):
        wired = Wired(LANE, lanes[np.ix_(order, order)])
        return simulate(build("allreduce", algorithm, 8), M, Machine(wired, HBM, "multi"))

    trees = seconds("spanning_trees:links=dgx1,segments=32")
    assert 2 * trees < min(seconds("ring", way) for way in rings(lanes))
    assert 3.9 * trees < seconds("ring")  # in the order of the ranks: two of its links do not exist


def test_links_of_a_file_are_those_of_a_name(tmp_path, capsys):
    file = tmp_path / "8 gpus.txt"
    np.savetxt(file, 3 * named("dgx1", 8), "%d")
    algorithm = resolve(f"spanning_trees:links={file},segments=4")
    known = build("allreduce", "spanning_trees:links=dgx1", 8)
    assert resolve(f"spanning_trees:links={file}") == algorithm.partition(":")[0]
    assert digest(build("allreduce", algorithm.partition(":")[0], 8)) == digest(known)
    assert build("allreduce", algorithm, 8).chunks == 4 * known.chunks
    assert build("broadcast", algorithm, 4, 3).size == 4  # the first four
    with pytest.raises(UnknownAlgorithm, match="join 9 ranks, but 8"):
        build("allreduce", algorithm, 9)
    line = f"simulate -n 8 -b 64M --ports multi --topology {tmp_path}/ring.txt --algorithm"
    np.savetxt(tmp_path / "ring.txt", named("ring", 8), "%d")
    assert main([*line.split(), f"ring,direct,spanning_trees:links={tmp_path}/ring.txt"]) == 0
    _, names, row, told = capsys.readouterr().out.splitlines()
    assert names.split() == ["ranks", "ring", "direct", f"spanning_trees:links={tmp_path}/ring.txt"]
    assert told.endswith(f" spanning_trees:links={tmp_path}/ring.txt,segments=16")
    ring, direct, trees = map(float, row.split()[1:4])
    assert ring < direct and trees > 0


@pytest.mark.parametrize(
    ("text", "told"), [("0 1 1", "square"), ("a b", "could not"), (None, "not found")]
)
def test_files_that_cannot_be(tmp_path, text, told):
    file = tmp_path / "links.txt"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UnknownAlgorithm, match=f"links.txt has no links between ranks: .*{told}"):
        resolve(f"spanning_trees:links={file}")


@pytest.mark.parametrize(
    ("links", "hint"),
    [
        ([[0, 1, 1]], "square matrix"),
        ([[0, 1], [2, 0]], "symmetric, but 1 from rank 0 to 1 and 2 back"),
        ([[0, -1], [-1, 0]], "whole numbers"),
        ([[0, 0.5], [0.5, 0]], "whole numbers"),
        ([[0, np.nan], [np.nan, 0]], "whole numbers"),
        ([[0, 9e18], [9e18, 0]], "whole numbers"),
        ([[0, 1, 0], [1, 0, 0], [0, 0, 0]], "do not join all ranks"),
    ],
)
def test_matrices_that_cannot_be(links, hint):
    with pytest.raises(ValueError, match=hint):
        spanning_trees.schedule(links)
