"""Rounds on topologies; test_cost_models.py has the closed forms."""

from dataclasses import replace

import numpy as np
import pytest

from collectives.__main__ import main
from collectives.algorithms import ALGORITHMS, build
from collectives.algorithms.links import dgx1
from collectives.analysis.simulate import Machine, simulate
from collectives.analysis.topology import (
    Cluster,
    FatTree,
    Islands,
    LinkCost,
    Topology,
    Torus,
    Wired,
)
from collectives.analysis.topology import build as topology
from collectives.errors import ScheduleError, TooLarge

ALPHA, BETA, GAMMA = 2e-6, 1e-9, 3e-10
LINK = LinkCost(ALPHA, BETA)
M = 1 << 20


def seconds(algorithm, p, network=None, ports="one", nbytes=M, collective="allreduce"):
    machine = Machine(network or Topology(LINK), GAMMA, ports)
    return simulate(build(collective, algorithm, p), nbytes, machine)


def test_messages_that_arrive_in_later_rounds_are_refused():
    """Round by round, nobody would wait for them."""

    ring = build("allreduce", "ring", 3)
    late = replace(ring, generate=lambda rank: iter([*[()] * rank, *ring.rounds(rank)]))
    with pytest.raises(ScheduleError, match="ring on 3 ranks: it cannot be simulated"):
        simulate(late, M, Machine(Topology(LINK)))


def test_segments_give_the_tree_the_bandwidth_of_the_ring():
    p, nbytes = 16, 64 << 20
    ring = seconds("ring", p, nbytes=nbytes)
    assert seconds("double_binary_tree", p, nbytes=nbytes) > 3 * ring
    assert seconds("double_binary_tree:segments=64", p, nbytes=nbytes) < 1.8 * ring


def test_a_tapered_fat_tree_slows_what_crosses_it():
    thin = FatTree(LINK, leaf=4, taper=4.0)
    assert seconds("halving_doubling", 4, thin) == seconds("halving_doubling", 4)
    assert seconds("butterfly", 8, thin) > 1.5 * seconds("butterfly", 8)
    assert seconds("ring", 16, thin) == pytest.approx(seconds("ring", 16), rel=0.01)


def test_a_node_is_faster_inside():
    nodes = Cluster(LINK, per_node=4)
    assert seconds("ring", 4, nodes) < seconds("ring", 4) / 2
    assert seconds("butterfly", 16, nodes) > seconds("butterfly", 16)


def test_unequal_links_make_the_order_of_a_ring_matter():
    """0-3-2-1-5-6-7-4-0 goes by double links all round; 3-4 and 7-0 are none."""
    node = Islands(LINK)
    order = np.array([0, 3, 2, 1, 5, 6, 7, 4])
    double = node.beta(order, np.roll(order, -1))
    assert (double == double[0]).all()
    assert node.beta(np.array([3]), np.array([4])) > 4 * double[0]
    good = Islands(LINK, lanes=dgx1(8)[np.ix_(order, order)])
    assert seconds("ring", 8, good) < seconds("ring", 8, node) / 2
    assert seconds("ring", 16, node) > seconds("ring", 8, node)


def test_messages_between_ranks_without_a_link_share_those_of_others():
    """On a line of 1 and 2 lanes, 0-2 goes by both links, and halves the wide one for 1-2."""
    line = Wired(LINK, np.array([[0, 1, 0], [1, 0, 2], [0, 2, 0]]))
    source, target = np.array([0, 1]), np.array([2, 2])
    narrow, wide = line.shared(source, target)
    assert (narrow[0].tolist(), narrow[1]) == ([[1, -1], [-1, -1]], BETA)
    assert (wide[0].tolist(), wide[1]) == ([[-1, 5], [5, -1]], BETA / 2)
    assert line.beta(source, target).tolist() == [BETA, BETA / 2]
    assert line.alpha(source, target).tolist() == [1.1 * ALPHA, ALPHA]


def test_a_torus_shares_links_between_hops():
    around = Torus(LINK, shape=(8,))
    source, target = np.arange(8), (np.arange(8) + 3) % 8
    ((links, _),) = around.shared(source, target)
    assert topology("torus3d", 8, LINK).shape == (2, 2, 2)
    assert np.bincount(links[links >= 0], minlength=16).tolist() == [0, 3] * 8
    assert seconds("ring", 8, around) == pytest.approx(seconds("ring", 8))
    assert seconds("butterfly", 8, around) > 2 * seconds("butterfly", 8)


@pytest.mark.parametrize("network", [Topology(LINK), Cluster(LINK, 4), Torus(LINK, shape=(3, 4))])
@pytest.mark.parametrize("ports", ["one", "multi"])
def test_rank_0_of_a_uniform_schedule_stands_for_all(network, ports):
    """Rounds that only copy, or only some that reduce, count as what they are; of rounds that
    differ, none is skipped where links do."""
    machine = Machine(network, GAMMA, ports)
    for algorithm in (one for one in ALGORITHMS if one.uniform):
        for size in (1, 2, 12):
            schedule = algorithm.schedule(size)
            whole = simulate(schedule, 3 << 18, machine)
            assert simulate(schedule, 3 << 18, machine, uniform=True) == pytest.approx(whole)


def test_what_is_too_large_is_left_out_and_segments_are_not_uniform(monkeypatch, capsys):
    monkeypatch.setattr("collectives.analysis.simulate.MOST_STEPS", 100)
    with pytest.raises(TooLarge, match="too many steps"):
        seconds("ring", 32)
    assert main(["simulate", "-n", "32", "--algorithm", "ring,ring:segments=4"]) == 0
    _, ring, segments, fastest = capsys.readouterr().out.splitlines()[-1].split()
    assert float(ring) and (segments, fastest) == ("-", "ring")
    assert main(["cost", "alltoall", "-n", "32"]) == 0  # 31 rounds that differ by their distance
    pairwise, bruck, linear = capsys.readouterr().out.splitlines()[2:5]
    assert float(pairwise.split()[2]) and float(bruck.split()[2]) and linear.split()[2] == "-"
    for collective in ("broadcast", "reduce", "scan"):  # rank 0 of a chain has few steps
        with pytest.raises(TooLarge, match="chain on 64 ranks has too many steps"):
            seconds("chain", 64, collective=collective)
        assert seconds("chain", 10, collective=collective)
