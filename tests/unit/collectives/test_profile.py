"""The sums and the sample of a profile, and who waited for whom in it."""

import argparse
import json
import sys
from random import Random
from threading import Thread
from time import perf_counter

import numpy as np
import pytest
from mpi4py import MPI

from collectives.run import record
from collectives.run.calls import Watch, named_bytes
from collectives.run.program import parse
from collectives.run.record import CAME, WAITED, Kept, Recorder, Site
from collectives.run.report import gains, write
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


def test_sites_of_code_that_is_made_again_and_again_are_bounded(monkeypatch):
    monkeypatch.setattr(record, "MOST_SITES", 3)
    recorder = Recorder()
    for number in range(9):
        text = "recorder.add(sys._getframe(), 'Bcast', 0.0, [], 0)"
        exec(compile(text, f"made {number}", "exec"), {"recorder": recorder, "sys": sys})
    *_, last = recorder.sites.values()
    assert (len(recorder.sites), last.where, last.calls) == (4, "Bcast elsewhere", 6)


def test_a_profile_that_cannot_be_written_is_printed(tmp_path):
    told = write([ran(9, [Kept(5, 1, 2, 0, BOTH)])], tmp_path / "none" / "profile", 0)
    assert told.startswith("No rank is waited for long")
    assert "No such file or directory; name another file by --profile=FILE" in told


@pytest.mark.parametrize("kind", ["", " in shared memory"])
def test_gains_say_by_which_table_and_what_shared_memory_may_add(monkeypatch, kind):
    monkeypatch.delenv("COLLECTIVES_TUNING", raising=False)
    site = Site(0, "Allreduce at x.py:1", calls=1, nbytes=8)
    site.took["ring", f"8 bytes{kind}, 4 ranks: 1.2x native in the table for 2 ranks"] += 1
    told = gains([site])
    assert told.startswith("chosen by the built-in table; nothing was measured")
    site.took["native", "the table has no x on 9 ranks of several nodes; tune measures it"] += 1
    lacks = "it lacks rules of several nodes, where the library serves calls: tune measures it"
    assert gains([site]).startswith(f"chosen by the built-in table; {lacks}\n")
    assert ("comm.empty" in told) == (not kind)


def ran(whole, kept, **sums):
    site = Site(0, "Barrier at x.py:1", len(kept), sum(one.ended - one.begun for one in kept))
    for name, value in sums.items():
        setattr(site, name, value)
    return Ran(whole, [site], kept)


def test_a_rank_waits_for_the_last_that_came_before_its_call_ended():
    # In a broadcast, rank 2 comes when rank 1 has gone: nobody waits for it.
    calls = ((2, 2.5), (1, 3), (6, 7))
    found = sampled([ran(9, [Kept(5, begun, ended, 0, BOTH)]) for begun, ended in calls])
    assert [own[0][3:5] for own in found] == [(0.0, 0), (1, 0), (0.0, 2)]


def test_a_wait_has_a_late_message_though_its_call_began_earlier():
    receiver = [Kept(-7, 0.0, 0.1, 0, CAME), Kept(-7, 1.0, 4.0, 0, WAITED)]
    found = sampled([ran(5, [Kept(-7, 3.0, 3.1, 0, CAME)]), ran(5, receiver)])
    assert found[1] == [(0.0, 0.1, 0, 0.0, 1, -7), (1.0, 4.0, 0, 2.0, 0, -7)]


def test_a_test_that_is_not_done_counts_no_message_of_an_old_status():
    recorder, status, x = Recorder(), MPI.Status(), np.zeros(1)
    comm = Watch(recorder).communicator(MPI.Intracomm)(MPI.COMM_SELF)
    first, second = (comm.Irecv(np.zeros(1), MPI.ANY_SOURCE, MPI.ANY_TAG) for _ in range(2))
    comm.Send(x, 0, 1)
    first.Wait(status)
    assert not second.Test(status)
    comm.Send(x, 0, 1)
    second.Wait(status)
    assert len(recorder.kept) == 4  # two sends and two receives


def test_a_site_waits_for_the_share_of_its_sample():
    ranks = [
        ran(100, [Kept(8, 2.0, 3.0, 0, BOTH)], calls=50, seconds=50.0),
        ran(100, [Kept(8, 1.0, 3.0, 0, BOTH)], calls=50, seconds=90.0, before=1.0),
    ]
    (cost,) = costs(ranks, sampled(ranks))
    assert cost.waited == [0, 45.0] and cost.late == {0: 45.0}
    assert cost.calls == [50, 50]


def test_a_thread_has_a_row_of_its_own(tmp_path):
    recorder = Recorder()

    def receive(calls, seconds):
        for _ in range(calls):
            recorder.add(sys._getframe(), "Recv", perf_counter() - seconds, [8], BOTH)

    thread = Thread(target=receive, args=(2, 6.0))
    thread.start()
    thread.join()
    receive(1, 4.0)
    sites = list(recorder.sites.values())
    assert [bool(site.thread) for site in sites] == [True, False] and sites[0].before == 0.0
    told = write([Ran(10.0, sites, recorder.kept)], tmp_path / "found", 0)
    rows = [line.split()[:4] for line in told.splitlines()[3:5]]
    assert [row[0] for row in rows] == ["0", "0.1"]
    assert [row[2:] for row in rows] == [["60.0%", "40.0%"], ["0.0%", "100.0%"]]
    events = json.loads((tmp_path / "found.json").read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events[:2]] == ["rank 0", "rank 0.1"]
    assert {event["tid"] for event in events[2:]} == {0, 1}


def test_bytes_are_those_of_the_items_that_a_call_names():
    column, items = MPI.DOUBLE.Create_vector(4, 1, 9).Commit(), np.zeros(100)
    for spec, nbytes in (
        (items, 800),
        ([items, None, MPI.DOUBLE], 800),
        ([items, 3, MPI.DOUBLE], 24),
        ([items, (2, 0), column], 64),
        ([items, [2, 3], MPI.DOUBLE], 40),
        ([items, (np.array([2, 3]), None), MPI.DOUBLE], 40),
        ([items, [2, 3], [0, 2], MPI.DOUBLE], 40),
        (bytearray(3), 3),
        (7, 0),
    ):
        assert named_bytes(spec) == nbytes
    column.Free()


def said(late_by):
    """The first line of a profile of an all-reduce, to which ranks come late by these seconds."""
    ranks = [
        ran(sum(map(max, late_by)) + len(late_by), [
            Kept(n, n + late[rank], n + max(late) + 0.01, 0, BOTH) for n, late in enumerate(late_by)
        ])
        for rank in range(len(late_by[0]))
    ]  # fmt: skip
    waits = sampled(ranks)
    return finding(ranks, waits, costs(ranks, waits))


def test_a_rank_is_not_blamed_for_a_machine_s_noise():
    assert said([(0.0,)] * 8).startswith("No rank is waited for long: ")
    draw = Random(1)
    for ranks in (2, 3, 8):
        noise = [[0.5 * draw.random() for _ in range(ranks)] for _ in range(40)]
        assert " for one and another, " in said(noise)
        paused = [*noise[:20], [0.9, *noise[20][1:]], *noise[21:]]
        assert " for one and another, " in said(paused)
        for late in ([0.4] * 3, [0.2, 0.6] * 10):
            assert said([(0.0,) * (ranks - 1) + (each,) for each in late]).startswith(
                f"Rank {ranks - 1} "
            )


def test_a_root_that_computes_longer_is_slow():
    """It has the blocks of all ranks in a scatter, which is no reason."""
    ranks = []
    for longer in (0.5, 0.0, 0.0, 0.0):
        once = Kept(7, 0.0, 0.1, 0, BOTH)
        many = [Kept(n, 1.5 * n - 0.5 + longer, 1.5 * n + 0.1, 1, BOTH) for n in range(20, 40)]
        scatter = Site(0, "Scatter at x.py:1", 1, 0.1, 4096 if longer else 1024)
        site = Site(1, "Allreduce at x.py:2", 20, 2 + 10 - 20 * longer, 160, 20 + 20 * longer)
        ranks.append(Ran(60.0, [scatter, site], [once, *many]))
    waits = sampled(ranks)
    told = finding(ranks, waits, costs(ranks, waits))
    assert told.startswith("Rank 0 is slow, it computes 1.5 times as long per call: ")


@pytest.mark.parametrize(
    ("words", "profile", "replaced", "arguments"),
    [
        ("--profile SCRIPT --profile", "profile", None, "--profile"),
        ("--profile=here SCRIPT", "here", None, ""),
        ("--replace gloo --profile SCRIPT a --replace b", "profile", "gloo", "a --replace b"),
        ("--profile --replace=gloo,nccl SCRIPT", "profile", "gloo,nccl", ""),
    ],
)
def test_a_profile_without_a_file_takes_no_word(words, profile, replaced, arguments):
    parser = argparse.ArgumentParser()
    parser.add_argument("--replace")
    found = parse(parser, words.replace("SCRIPT", __file__).split(), ["--replace"])
    assert (found.profile, found.replace, found.script) == (profile, replaced, __file__)
    assert found.arguments == arguments.split()
