"""From measured times to the rules that ``auto`` goes by."""

from types import SimpleNamespace

import pytest

from benchmarks.portable import portable
from collectives.bench import tune
from collectives.bench.measure import Result
from collectives.bench.tune import rules
from collectives.calls.choice import Entry, Rule
from collectives.calls.tables import DEFAULT, load
from collectives.commands import bench
from collectives.contracts import CONTRACTS


def at(nbytes, **times):
    """Results measured at one size: microseconds in each repeat."""
    return [
        Result(
            "allreduce", name, name, "", nbytes, 1, "f4", "sum", False, "numpy", 2, 1, times_us=us
        )
        for name, us in times.items()
    ]


def test_the_fastest_from_each_size_on():
    found = rules([
        at(8, native=[1.0] * 4, ring=[2.0] * 4, butterfly=[1.5] * 4),
        at(32, native=[4.0] * 4, ring=[3.0] * 4, butterfly=[2.0] * 4),
        at(128, native=[9.0] * 4, ring=[3.0] * 4, butterfly=[6.0] * 4),
    ])  # fmt: skip
    wanted = [(0, "native", 1.0), (32, "butterfly", 2.0), (128, "ring", 3.0)]
    assert [(r.from_bytes, r.algorithm, r.ratio) for r in found] == wanted


@pytest.mark.parametrize(
    ("native", "ring", "chosen"),
    [
        ([10.0] * 4, [5.0] * 4, ("ring", 2.0)),
        ([10.0] * 4, [5.0, 5.0, 5.0, 15.0], ("ring", 2.0)),  # one repeat in four may be another
        ([10.0, 30.0] * 2, [5.0, 15.0] * 2, ("ring", 2.0)),  # slow in half of them, for both alike
        ([10.0] * 4, [5.0, 5.0, 15.0, 15.0], ("native", 1.0)),  # not in three of four
        ([10.0] * 4, [9.7] * 4, ("native", 1.0)),  # faster, but not clearly
    ],
)
def test_ours_must_be_clearly_faster_repeat_by_repeat(native, ring, chosen):
    (rule,) = rules([at(8, native=native, ring=ring)])
    assert (rule.algorithm, rule.ratio) == chosen


def test_sizes_that_are_rounded_to_the_same_blocks_are_measured_once():
    """Rules of one size would be refused after all was measured, and an empty block is no size."""
    counts = [case.count(8) for case in tune.cases("alltoall", [8, 16, 32, 40, 64, 128], 8, 5)]
    assert counts == [1, 2, 4]


def test_what_is_not_for_so_many_ranks_is_not_measured():
    """Packed trees are for 512 at most."""
    measured = tune.candidates("broadcast", 513)
    assert "spanning_trees" not in measured and {"chain", "binomial_tree", "native"} < {*measured}
    assert {*bench.algorithms("broadcast", "all", 513)} == {*measured} - {
        name for name in measured if ":" in name
    }


def test_no_change_for_little():
    found = rules([
        at(8, native=[9.0] * 4, ring=[3.0] * 4, butterfly=[5.0] * 4),
        at(32, native=[9.0] * 4, ring=[3.1] * 4, butterfly=[3.0] * 4),
    ])  # fmt: skip
    assert [r.algorithm for r in found] == ["ring"]


def entry(memory, *told):
    return Entry("MPICH", "allreduce", memory, 2, 2, [Rule(*rule) for rule in told])


@pytest.mark.parametrize(
    ("memory", "told", "kept"),
    [
        ("shared", [(0, "native", 1.0)], [(0, "native")]),
        # An algorithm that is faster at a few bytes here is often slower there.
        ("shared", [(0, "ring", 1.2)], [(0, "native"), (32768, "ring")]),
        ("shared",
         [(0, "native", 1.0), (512, "ring", 1.1), (8192, "direct", 1.1), (1 << 20, "ring", 4.0)],
         [(0, "native"), (32768, "direct"), (1 << 20, "ring")]),
        # So is what is hardly faster.
        ("shared", [(0, "native", 1.0), (65536, "direct", 1.1)], [(0, "native")]),
        ("shared", [(32768, "direct", 1.4), (65536, "ring", 1.1), (1 << 20, "direct", 1.3)],
         [(0, "native"), (32768, "direct"), (65536, "native"), (1 << 20, "direct")]),
        ("shared", [(64, "ring", 2.0), (1 << 20, "native", 1.0)],
         [(0, "native"), (32768, "ring"), (1 << 20, "native")]),
        # In ordinary memory only what is far faster: this was 0.76 elsewhere.
        ("numpy", [(0, "native", 1.0), (65536, "ring", 1.9)], None),
        ("numpy", [(0, "ring", 9.0)], [(0, "native"), (32768, "ring")]),
        ("numpy", [(0, "ring", 1.5), (1 << 20, "direct", 3.0)],
         [(0, "native"), (1 << 20, "direct")]),
    ],
)  # fmt: skip
def test_what_holds_on_other_machines(memory, told, kept):
    found = portable([entry("cupy", *told), entry(memory, *told)])
    rules = [[(rule.from_bytes, rule.algorithm) for rule in one.rules] for one in found]
    assert [one.memory for one in found] == [memory] * len(rules)
    assert rules == ([] if kept is None else [kept])


def test_the_table_that_ships_has_what_holds_on_other_machines():
    entries = load(DEFAULT).entries
    assert {entry.collective for entry in entries} == set(CONTRACTS) - {"barrier"}
    between_hosts = [entry for entry in entries if entry.ranks_per_node < entry.ranks]
    within = [entry for entry in entries if entry not in between_hosts]
    assert {entry.memory for entry in within} == {"numpy", "shared"}
    ordinary = {entry.collective for entry in within if entry.memory == "numpy"}
    assert ordinary == {"allreduce", "reduce_scatter"}
    assert {(e.mpi, e.collective) for e in between_hosts} == {("Open MPI", "reduce_scatter")}
    for entry in entries:
        first, *others = entry.rules
        assert (first.from_bytes, first.algorithm) == (0, "native")
        assert all(rule.from_bytes >= 32 << 10 for rule in others)


def test_a_slow_network_has_a_bandwidth_too(monkeypatch):
    """Rounded to 0, it would make a table that is refused."""
    seconds = {8: 1e-3, 4 << 20: 1e-3 + (4 << 20) / 2.5e6}
    monkeypatch.setattr(tune, "half_round_trip", lambda comm, nbytes, turns: seconds[nbytes])
    assert tune.ping_pong(SimpleNamespace(size=2)) == (1000.0, 0.0025)
