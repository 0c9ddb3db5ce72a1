"""Costs against the closed forms, and the registry."""

from math import ceil, log2

import pytest

from collectives.algorithms import ALGORITHMS, build, check_default, names
from collectives.compile.cost import count
from collectives.errors import UnknownAlgorithm
from collectives.schedule import Copy, Send

SIZES = [2, 3, 4, 5, 7, 8, 12, 16, 17, 32, 33]


def cost(collective, algorithm, size):
    return count(build(collective, algorithm, size))


def rounds(p):
    return ceil(log2(p))


def folded(p):
    """The rounds that ranks beyond a power of two add."""
    return 2 * (p & (p - 1) > 0)


#: Published costs on p ranks: messages in a row, buffers sent by the busiest rank, reduced.
COSTS = {
    ("allreduce", "ring"): (lambda p: 2 * (p - 1), lambda p: 2 * (p - 1) / p, lambda p: 1 - 1 / p),
    ("allreduce", "circulant"): (
        lambda p: 2 * rounds(p), lambda p: 2 * (p - 1) / p, lambda p: 1 - 1 / p,
    ),
    ("allreduce", "binomial_tree"): (lambda p: 2 * rounds(p), None, None),
    ("allreduce", "direct"): (lambda p: 2, lambda p: 2 * (p - 1) / p, None),
    ("allreduce", "parameter_server"): (None, lambda p: p - 1, None),  # the result to everybody
    ("allreduce", "butterfly"): (lambda p: int(log2(p)) + folded(p), None, None),
    ("allreduce", "halving_doubling"): (lambda p: 2 * int(log2(p)) + folded(p), None, None),
    ("reduce_scatter", "ring"): (lambda p: p - 1, lambda p: (p - 1) / p, None),
    ("reduce_scatter", "circulant"): (rounds, lambda p: (p - 1) / p, None),
    ("reduce_scatter", "direct"): (lambda p: 1, lambda p: (p - 1) / p, None),
    ("allgather", "ring"): (lambda p: p - 1, lambda p: (p - 1) / p, None),
    ("allgather", "circulant"): (rounds, None, None),
    ("allgather", "bruck"): (rounds, None, None),
    ("alltoall", "pairwise"): (lambda p: p - 1, lambda p: (p - 1) / p, None),
    ("alltoall", "linear"): (lambda p: 1, None, None),
    ("alltoall", "bruck"): (rounds, None, None),
    ("reduce", "binomial_tree"): (rounds, None, None),
    ("gather", "binomial_tree"): (rounds, None, None),
    ("scatter", "binomial_tree"): (rounds, None, None),
    ("reduce", "chain"): (lambda p: p - 1, None, None),
    ("scan", "recursive_doubling"): (rounds, None, None),
    ("barrier", "dissemination"): (rounds, None, None),
}  # fmt: skip


@pytest.mark.parametrize("p", SIZES)
def test_costs_are_the_published_ones(p):
    for name, wanted in COSTS.items():
        found = cost(*name, p)
        for value, form in zip((found.latency, found.sent, found.reduced), wanted):
            assert form is None or value == pytest.approx(form(p)), name
    assert cost("allreduce", "ring", p).copied == 0
    assert cost("allreduce", "double_binary_tree", p).latency <= 2 * rounds(p)
    assert cost("allreduce", "double_binary_tree", p).sent <= 2.5
    assert cost("allreduce", "parameter_server", p).messages == 2 * (p - 1)


@pytest.mark.parametrize("algorithm", names("broadcast"))
def test_no_broadcast_stores_to_the_memory_of_the_root_that_may_be_read_only(algorithm):
    for p, root in ((size, root) for size in SIZES for root in {0, 1, size - 1}):
        schedule = build("broadcast", algorithm, p, root=root)
        steps = [step for steps in schedule.rounds(root) for step in steps]
        assert all(isinstance(step, Send | Copy) for step in steps)


def test_a_hierarchy_sends_one_shard_across():
    def across(schedule):
        return [
            (rank, step.chunk.length)
            for rank in range(8)
            for steps in schedule.rounds(rank)
            for step in steps
            if isinstance(step, Send) and step.peer // 4 != rank // 4
        ]

    schedule = build("allreduce", "hierarchical:local=4,inter=butterfly", 8)
    assert across(schedule) == [(rank, 1) for rank in range(8)]  # one chunk of four
    assert schedule.chunks == 4
    leaders = across(build("allreduce", "leaders:local=4", 8))
    assert {rank for rank, _ in leaders} == {0, 4}


@pytest.mark.parametrize(
    ("algorithm", "hint"),
    [
        ("rign", "did you mean 'ring'"),
        ("zzz", "there are ring, double_binary_tree"),
        ("ring:servers=2", "no option 'servers'; it has segments"),
        ("parameter_server:server=2", "no option 'server'; did you mean 'servers'"),
        ("parameter_server:servers=9", "must lie in 1..8"),
        ("parameter_server:servers=two", "servers=two must be a number"),
        ("parameter_server:servers", "write name:option=value"),
        ("ring:segments=1025", "from 1 to 1024"),
        ("hierarchical:local=3", "8 ranks are no whole number of nodes of 3"),
        ("hierarchical:intra=rign", "did you mean 'ring'"),
        ("hierarchical:intra=bruck", "no reduce_scatter algorithm 'bruck'; it is one for a"),
    ],
)
def test_unknown_algorithms_and_options(algorithm, hint):
    with pytest.raises(UnknownAlgorithm, match=hint):
        build("allreduce", algorithm, 8)


def test_what_can_be_a_default_and_what_not():
    for name in ("auto", "native", *(a.name for a in ALGORITHMS)):
        check_default(name, 4)
    for default, sentence in (
        ("nativ", "no collective has an algorithm 'nativ'; did you mean 'native'"),
        ("ring:segmnts=4", "ring has no option 'segmnts'; did you mean 'segments'"),
        ("ring:segments=0", "segments is a number from 1 to 1024, or auto"),
        ("parameter_server:servers=3", "servers=3 must lie in 1..2, the number of ranks"),
        ("native:segments=2", "native has no options"),
    ):
        with pytest.raises(UnknownAlgorithm, match=sentence):
            check_default(default, 2)


def test_a_segment_holds_an_item():
    assert build("allreduce", "ring:segments=1024", 3, items=100).chunks == 3 * 34
    assert build("allreduce", "ring:segments=4", 3, items=100).chunks == 3 * 4
    assert build("allreduce", "ring:segments=4", 3, items=0).chunks == 3
