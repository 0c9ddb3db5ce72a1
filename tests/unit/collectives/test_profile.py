"""The sums and the sample of a profile, and who waited for whom in it."""

import argparse
import sys
from time import perf_counter

import pytest

from collectives.run import record
from collectives.run.program import parse
from collectives.run.record import CAME, WAITED, Kept, Recorder, Site
from collectives.run.waits import Ran, costs, finding, sampled

BOTH = CAME | WAITED


def test_memory_is_bounded_and_all_ranks_keep_the_same_calls(monkeypatch):
    monkeypatch.setattr(record, "MOST", 100)
    ranks = [Recorder(), Recorder()]
    for call in range(10_000):
        for recorder in ranks:
            recorder.add(sys._getframe(), "Barrier", perf_counter(), [hash((call,))], BOTH)
    one, other = ([kept.number for kept in recorder.kept] for recorder in ranks)
    assert one == other and 20 < len(one) <= 100
    (site,) = ranks[0].sites.values()
    assert site.calls == 10_000 and site.where.startswith("Barrier at ")


def ran(whole, kept, **sums):
    """A rank with one call site."""
    site = Site(0, "Barrier at x.py:1", len(kept), sum(one.ended - one.begun for one in kept))
    for name, value in sums.items():
        setattr(site, name, value)
    return Ran(whole, [site], kept)


def test_a_rank_waits_for_the_last_that_came_before_its_call_ended():
    # In a broadcast, rank 2 comes when rank 1 has gone: nobody waits for it.
    ranks = [
        ran(9, [Kept(5, begun, ended, 0, BOTH)]) for begun, ended in ((2, 2.5), (1, 3), (6, 7))
    ]
    waits = [own[0][3:] for own in sampled(ranks)]
    assert waits == [(0.0, 0), (1, 0), (0.0, 2)]


def test_a_wait_has_a_late_message_though_its_call_began_earlier():
    receiver = [Kept(-7, 0.0, 0.1, 0, CAME), Kept(-7, 1.0, 4.0, 0, WAITED)]
    sender = [Kept(-7, 3.0, 3.1, 0, CAME)]
    found = sampled([ran(5, sender), ran(5, receiver)])
    assert found[1] == [(0.0, 0.1, 0, 0.0, 1), (1.0, 4.0, 0, 2.0, 0)]


def test_a_site_waits_for_the_share_of_its_sample():
    ranks = [
        ran(100, [Kept(8, 2.0, 3.0, 0, BOTH)], calls=50, seconds=50.0),
        ran(100, [Kept(8, 1.0, 3.0, 0, BOTH)], calls=50, seconds=90.0, before=1.0),
    ]
    (cost,) = costs(ranks, sampled(ranks))
    assert cost.waited == [0, 45.0] and cost.late == {0: 45.0}
    assert cost.calls == [50, 50]


@pytest.mark.parametrize("alone", [True, False])
def test_ranks_that_wait_for_nobody_in_particular_are_told_so(alone):
    kept = [[Kept(n, n + (n + r) % 2 * 0.5, n + 0.9, 0, BOTH) for n in range(8)] for r in range(3)]
    ranks = [ran(8.0, own) for own in kept[: 1 if alone else 3]]
    said = finding(ranks, costs(ranks, sampled(ranks)))
    assert said.startswith("No rank is waited for long: " if alone else "R")


@pytest.mark.parametrize(
    ("words", "profile", "replaced", "arguments"),
    [
        ("--profile SCRIPT --profile", "profile", None, ["--profile"]),
        ("--profile=here SCRIPT", "here", None, []),
        (
            "--replace gloo --profile SCRIPT a --replace b",
            "profile",
            "gloo",
            ["a", "--replace", "b"],
        ),
        ("--profile --replace=gloo,nccl SCRIPT", "profile", "gloo,nccl", []),
    ],
)
def test_a_profile_without_a_file_takes_no_word(words, profile, replaced, arguments):
    parser = argparse.ArgumentParser()
    parser.add_argument("--replace")
    found = parse(parser, words.replace("SCRIPT", __file__).split(), "--replace")
    assert (found.profile, found.replace, found.script) == (profile, replaced, __file__)
    assert found.arguments == arguments
