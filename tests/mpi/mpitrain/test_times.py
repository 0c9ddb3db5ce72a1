"""Where the time of each rank goes: the steps' shares, and who waited for whom."""

from functools import partialmethod
from itertools import islice
from time import sleep

import pytest

from mpitrain.metrics.records import Step
from mpitrain.parallel import summation
from mpitrain.ranks.together import together
from mpitrain.report.facts import ranks, waited_for
from mpitrain.run import train
from mpitrain.start import start
from mpitrain.sync import loop
from mpitrain.sync.anchored import Anchored
from mpitrain.training import account, feed
from mpitrain.training.evaluation import evaluate
from mpitrain.training.feed import Feed
from mpitrain.update import gradient
from mpitrain.update.gradient import GlobalGradient
from tests.mpi.mpitrain.layouts import RANKS, changed, in_folder, job, mlp

pytestmark = pytest.mark.at_most(5)

SLOW = RANKS // 2
SECONDS, STEPS = 0.1, 4


def times(trainer):
    return trainer.parts.account.times(trainer.parts.grid.place)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("layout", ["data", "pipe", "asynchronous"])
def test_the_time_of_ranks_that_wait_is_counted_and_told_by_whom(comm, layout, monkeypatch):
    keys = {} if layout == "data" else {"pipe": RANKS}
    if layout == "asynchronous":
        keys |= {"schedule": layout, "window": 1}
    config = job("gpt" if layout == "pipe" else "convnet", **keys)
    held = Feed._held

    def slow(*given):
        sleep(SECONDS if comm.rank == SLOW else 0.0)
        return held(*given)

    monkeypatch.setattr(Feed, "_held", slow)
    with start(comm, config) as trainer:
        records = list(islice(trainer.run_epoch(0), STEPS))
        every = times(trainer).ranks
    found = ranks(every)
    assert len(every) == RANKS and all(isinstance(record, Step) for record in records)
    # The steps say what the ranks say.
    lasted = RANKS * sum(record.seconds for record in records)
    assert sum(rank.seconds for rank in found) == pytest.approx(lasted, rel=0.05)
    shares = sum(r.seconds * (r.comm_share + r.wait_share) for r in records) * RANKS
    told = sum(rank.reduction + rank.waiting for rank in found)
    assert told == pytest.approx(shares, rel=0.1, abs=0.02)
    # Each of the others has lost what the slow one slept.
    for number, rank in enumerate(found):
        assert rank.reduction + rank.waiting >= 0.5 * SECONDS * STEPS or number == SLOW
    assert found[SLOW].computing >= SECONDS * STEPS
    assert all(rank.memory > 10**6 for rank in found)
    if layout == "data":
        assert next(iter(waited_for(found))) == SLOW
    else:
        neighbours = {SLOW - 1, SLOW + 1} & set(range(RANKS))
        assert any(every[n].waiting.get(SLOW, 0.0) >= 0.5 * SECONDS for n in neighbours)
        assert sum(r.wait_share for r in records) > 0


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("owner", "slow", "reduces"), [(GlobalGradient, "own_squares", 0.0), (Anchored, "mean", 0.5)]
)
def test_a_ranks_own_work_and_sums_are_no_waiting(comm, owner, slow, reduces, monkeypatch):
    """By a clock that reading and what is ``slow`` move by a second, and nothing else."""
    clock = [0.0]
    for module in (account, feed, gradient, loop, summation):
        monkeypatch.setattr(module, "perf_counter", lambda: clock[0])

    def slowed(one, act, *given, **named):
        clock[0] += 1.0
        return act(one, *given, **named)

    for whose, name in ((Feed, "_held"), (owner, slow)):
        monkeypatch.setattr(whose, name, partialmethod(slowed, getattr(whose, name)))
    sync = {"kind": "local", "start": STEPS} if reduces else {}
    with start(comm, changed(mlp(), sync=sync)) as trainer:
        records = list(islice(trainer.run_epoch(0), STEPS))
        told = ranks(times(trainer).ranks)
    shares = [(one.seconds, one.wait_share, one.comm_share) for one in records]
    assert shares == [(2.0, 0.0, reduces)] * STEPS
    assert [(one.waiting, one.reduction) for one in told] == [(0, 2 * STEPS * reduces)] * RANKS


@pytest.mark.parametrize("algorithm", ["ring", "native"])
def test_the_bytes_of_a_run_are_those_of_its_steps(comm, algorithm):
    config = changed(mlp(algorithm=algorithm), sync={"kind": "local", "period": 8})
    with start(comm, config) as trainer:
        records = list(trainer.run_epoch(0))
        evaluate(trainer.parts, 0)  # its bytes belong to no step
        records += trainer.run_epoch(1)
        moved = comm.allreduce(trainer.parts.account.bytes_moved)
        assert moved >= RANKS * trainer.parts.dense_bytes * (len(records) // 8)
    assert moved == pytest.approx(RANKS * sum(r.sent_bytes + r.shared_bytes for r in records))


def test_who_waits_for_the_clients_of_others_does_not_compute(comm, monkeypatch):
    clock = [0.0]

    def now():
        clock[0] += 1e-9
        return clock[0]

    def late(*given):
        found = together(*given)
        clock[0] += 1.0  # until the last rank is there
        return found

    monkeypatch.setattr(account, "perf_counter", now)
    monkeypatch.setattr(account, "together", late)
    with start(comm, changed(mlp(), federated={"clients": 4})) as trainer:
        *_, step = trainer.run_epoch(0)
        told = ranks(times(trainer).ranks)
    assert (step.seconds, step.wait_share) == pytest.approx((1.0, 1.0), abs=1e-4)
    assert [one.waiting for one in told] == pytest.approx([1.0] * RANKS, abs=1e-4)


@pytest.mark.parametrize("kind", ["local", "delayed"])
def test_checkpoints_and_checks_within_an_epoch_add_no_bytes_to_its_steps(comm, kind, folder):
    found = []
    for every in (0, 3):
        keys = {"checkpoint": {"every": every}, "sync": {"kind": kind, "period": 4}}
        config = changed(mlp(), check_every=every, optim={"average": 0.8}, epochs=1, **keys)
        with start(comm, in_folder(config, folder / str(every))) as trainer:
            train(trainer, on_record=(records := []).append)
        steps = [one for one in records if isinstance(one, Step)]
        found.append([(one.sent_bytes, one.shared_bytes) for one in steps])
    assert found[0] == found[1]


@pytest.mark.mpi(min_size=2)
def test_the_records_of_a_run_are_the_same_on_all_ranks(comm, folder):
    """One stage has replicas, and the other none, so that the stages differ in their sums."""
    config, seen = in_folder(job("mlp", replicas=(RANKS - 1, 1)), folder), []
    with start(comm, config) as trainer:
        train(trainer, on_record=seen.append)
        dense = comm.allreduce(trainer.parts.dense_bytes) / RANKS
    assert comm.allgather(seen) == [seen] * RANKS
    assert seen[-1].dense_bytes == dense
