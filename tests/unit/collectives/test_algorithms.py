"""Costs against the closed forms, the shape of the trees, and the registry."""

from math import ceil, log2

import pytest

from collectives.algorithms import ALGORITHMS, build, check_default, names
from collectives.algorithms.double_binary_tree import node, trees
from collectives.algorithms.segments import passes_on, segmented
from collectives.analysis.claims import is_aligned
from collectives.analysis.verify import verify
from collectives.compile.cost import count
from collectives.errors import UnknownAlgorithm
from collectives.schedule import Copy, Recv, Schedule, Send, recvbuf, sendbuf, workspace
from tests.cases import every_algorithm

SIZES = [2, 3, 4, 5, 7, 8, 12, 16, 17, 32, 33]


def cost(collective, algorithm, size):
    return count(build(collective, algorithm, size))


def rounds(p):
    return ceil(log2(p))


#: Published costs on p ranks: messages in a row, buffers sent by the busiest rank, reduced.
COSTS = {
    ("allreduce", "ring"): (lambda p: 2 * (p - 1), lambda p: 2 * (p - 1) / p, lambda p: 1 - 1 / p),
    ("allreduce", "circulant"): (
        lambda p: 2 * rounds(p), lambda p: 2 * (p - 1) / p, lambda p: 1 - 1 / p,
    ),
    ("allreduce", "binomial_tree"): (lambda p: 2 * rounds(p), None, None),
    ("allreduce", "direct"): (lambda p: 2, lambda p: 2 * (p - 1) / p, None),
    ("allreduce", "parameter_server"): (None, lambda p: p - 1, None),  # the result to everybody
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


@pytest.mark.parametrize("p", [3, 5, 6, 7, 12, 33])
def test_the_fold_costs_two_more_rounds(p):
    dimensions = int(log2(p))
    assert cost("allreduce", "butterfly", p).latency == dimensions + 2
    assert cost("allreduce", "halving_doubling", p).latency == 2 * dimensions + 2


def test_a_rank_is_interior_in_one_tree_only():
    for p in range(3, 40):
        both = [r for r in range(p) if all(tree.children for tree in trees(r, p))]
        assert both == ([] if p % 2 == 0 else [0]), p


def test_the_tree_is_a_tree():
    for p in range(1, 40):
        nodes = [node(place, p) for place in range(p)]
        for place, at in enumerate(nodes):
            assert len(at.children) <= 2
            for child in at.children:
                assert nodes[child].parent == place
                assert nodes[child].height < at.height
        assert [place for place, at in enumerate(nodes) if at.parent is None] == [0], p


@pytest.mark.parametrize("algorithm", [a for a in ALGORITHMS if a.uniform])
def test_uniform_means_the_same_distances_on_every_rank(algorithm):
    ways = {
        tuple(
            tuple(sorted((type(s) is Send, (s.peer - rank) % 7) for s in r if type(s) is not Copy))
            for r in algorithm.schedule(7).rounds(rank)
        )
        for rank in range(7)
    }
    assert len(ways) == 1


@pytest.mark.parametrize("p", SIZES)
def test_reduce_scatters_are_half_an_all_reduce(p):
    for name in ("ring", "circulant", "direct"):
        half, whole = cost("reduce_scatter", name, p), cost("allreduce", name, p)
        assert 2 * half.latency == whole.latency
        assert 2 * half.sent == pytest.approx(whole.sent)


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
        ("hierarchical:local=3", "8 ranks are no whole number of nodes of 3"),
        ("hierarchical:intra=rign", "did you mean 'ring'"),
        ("hierarchical:intra=bruck", "no reduce_scatter algorithm 'bruck'; it is one for a"),
    ],
)
def test_unknown_algorithms_and_options(algorithm, hint):
    with pytest.raises(UnknownAlgorithm, match=hint):
        build("allreduce", algorithm, 8)


def test_every_name_can_be_a_default():
    for name in ("auto", "native", *(a.name for a in ALGORITHMS)):
        check_default(name, 4)


@pytest.mark.parametrize(
    ("default", "sentence"),
    [
        ("rign", "no collective has an algorithm 'rign'; did you mean 'ring'?"),
        ("nativ", "did you mean 'native'?"),
        ("ring:segmnts=4", "ring has no option 'segmnts'; did you mean 'segments'?"),
        ("ring:segments=0", "segments is a number from 1 to 1024, or auto"),
        ("ring:segments", "cannot read 'segments' in 'ring:segments'"),
        ("parameter_server:servers=3", "servers=3 must lie in 1..2, the number of ranks"),
        ("native:segments=2", "native has no options"),
        (123, "algorithm=123 is of type int; give a name, as in 'ring', 'auto' or 'native'"),
    ],
)
def test_what_cannot_be_a_default(default, sentence):
    with pytest.raises(UnknownAlgorithm) as raised:
        check_default(default, 2)
    assert sentence in str(raised.value)


def test_a_segment_holds_an_item():
    many = build("allreduce", "ring:segments=1024", 3, items=100)
    assert many.chunks == 3 * 34
    assert build("allreduce", "ring:segments=4", 3, items=100).chunks == 3 * 4
    assert build("allreduce", "ring:segments=4", 3, items=0).chunks == 3
    with pytest.raises(UnknownAlgorithm, match="from 1 to 1024"):
        build("allreduce", "double_binary_tree:segments=200000000", 3)


@every_algorithm
def test_messages_leave_and_arrive_in_rounds_of_the_same_number(algorithm):
    """Shared memory and segments that overlap go by it."""
    schedules = [algorithm.schedule(size) for size in (1, 2, 3, 4, 5, 7, 8, 9, 12, 16)]
    assert all(schedule.aligned and is_aligned(schedule) for schedule in schedules)


def test_segments_have_the_workspace_that_they_use():
    def through(rank, size):
        yield (Send(1, sendbuf[0]),) if rank == 0 else (Recv(0, workspace[0]),)
        if rank:
            yield (Copy(recvbuf[0], workspace[0]), Recv(0, recvbuf[1]))
        else:
            yield (Copy(recvbuf[0:2], sendbuf[0:2]), Send(1, sendbuf[1]))

    schedule = Schedule("broadcast", "through", 2, 2, 1, False, lambda rank: through(rank, 2))
    assert verify(schedule) and verify(segmented(schedule, 3))


@pytest.mark.parametrize(
    ("collective", "algorithm", "size", "answer"),
    [
        ("allgather", "direct", 5, False),
        ("allgather", "ring", 2, False),
        ("allgather", "ring", 3, True),
        ("alltoall", "pairwise", 4, False),
        ("broadcast", "binomial_tree", 2, False),
        ("broadcast", "chain", 3, True),
        ("allreduce", "direct", 2, True),
        ("reduce_scatter", "direct", 3, True),
        ("scatter", "binomial_tree", 4, True),
    ],
)
def test_what_passes_on(collective, algorithm, size, answer):
    assert passes_on(build(collective, algorithm, size)) is answer
