"""The checkpoint of the best test, and runs that end when tests do not get better."""

import math

import numpy as np
import pytest
from mpi4py import MPI
from msgspec.structs import replace

from mpitrain.checkpoint.reader import CheckpointReader
from mpitrain.checkpoint.writer import Writer
from mpitrain.metrics.reader import read_records
from mpitrain.metrics.records import Epoch, Resumed, Step, Summary
from mpitrain.ranks.stop import Stopped
from mpitrain.run import train
from mpitrain.start import start
from mpitrain.training.parts import UserObjects
from tests.cases import slow_case
from tests.mpi.mpitrain.layouts import RANKS, StopsAfter, equal, in_folder, job, layouts, whole

pytestmark = pytest.mark.at_most(5)

#: Scores that the tests measure, one after another; every epoch has two steps.
SCORES = [1.0, 3.0, 2.0, math.nan, 2.5, 9.0, 0.0, 0.0]
BEST, END = 4, 10
QUICK_ON = {"data": 1, "zero 3": 3, "pipe, 1f1b": 2}
LAYOUTS = [
    pytest.param(how, id=name, marks=pytest.mark.quick_on(QUICK_ON[name]))
    for name, how in layouts("mlp", RANKS).items()
    if name in QUICK_ON
]


class Scores:
    """A metric whose values are given, for each epoch of its trainer, which is set later."""

    def add(self, outputs, labels):
        return np.zeros(1)

    def value(self, totals):
        parts = self.trainer.parts
        return SCORES[parts.steps_done // parts.sampler.steps_per_epoch - 1]


def scored(folder, *, patience=3, best="higher score", every=2, **parallel):
    config = job("mlp", "float32", batch_size=719, micro_batches=2, **parallel)
    watch = {"patience": patience, "watch": "higher score"} if patience else {}
    kept = {"every": every, "keep": 1, "best": best}
    return in_folder(config, folder, evaluate=watch, checkpoint=kept, epochs=len(SCORES))


def run(comm, config, *, go_on=False, stop=None, end=None):
    """The records of a run, the trained values, and why it was stopped."""
    metric, records, why = Scores(), [], None
    flag = StopsAfter(stop) if stop else None

    def see(record):
        records.append(record)
        if isinstance(record, Step) and record.step == end:
            trainer.parts.asked.set_end("a pause")

    with start(comm, config, objects=UserObjects(metrics={"score": metric}), stop=flag) as trainer:
        metric.trainer = trainer
        if flag:
            flag.trainer = trainer
        try:
            train(trainer, go_on=go_on, on_record=see)
        except Stopped as error:
            why = str(error)
        values = whole(comm, trainer)
    comm.Barrier()
    return records, values, why


def of(kind, records):
    return [record for record in records if isinstance(record, kind)]


def names(folder, within="checkpoints"):
    return sorted(path.name for path in (folder / within).iterdir())


@pytest.mark.parametrize("parallel", LAYOUTS)
def test_the_best_stays_and_training_ends(comm, folder, parallel):
    records, values, _ = run(comm, scored(folder, **parallel))
    assert [test.metrics["score"] for test in of(Epoch, records)][:3] == SCORES[:3]
    assert len(of(Epoch, records)) == END // 2
    (summary,) = of(Summary, records)
    assert summary.ended == "no better higher score in 3 tests than 3 after step 4"
    assert names(folder) == [f"best-{BEST:08d}", f"step-{END:08d}"]
    best = CheckpointReader(folder / "checkpoints" / f"best-{BEST:08d}")
    best.verify()
    short = scored(folder / "short", best="", patience=0, **parallel)
    _, at_best, _ = run(comm, replace(short, train=replace(short.train, steps=BEST)))
    for name, value in at_best.items():
        np.testing.assert_array_equal(best.value(name), value)
        assert not np.array_equal(values[name], value)


@pytest.mark.parametrize(
    ("is_tested", "watched"),
    [(True, True), (False, False), *(slow_case(*pair) for pair in ((True, False), (False, True)))],
)
def test_a_run_that_is_killed_about_a_test_has_told_of_it_once(comm, folder, is_tested, watched):
    """The checkpoint that it goes on from was written before the test after the same step."""
    config = scored(folder) if watched else scored(folder, best="", patience=0)
    whole_run, _, _ = run(comm, config)
    path = folder / "metrics.jsonl"
    if comm.rank == 0:
        lines = path.read_text().splitlines(keepends=True)
        tests = [number for number, line in enumerate(lines) if '"event":"epoch"' in line]
        path.write_text("".join(lines[: tests[-1] + is_tested]))
    comm.Barrier()
    rest, _, _ = run(comm, config, go_on=True)
    assert of(Resumed, rest)[0].step == (END if watched else 2 * len(SCORES))
    found = of(Epoch, read_records(path).records)
    assert [test.epoch for test in found] == [test.epoch for test in of(Epoch, whole_run)]


@pytest.mark.parametrize("parallel", LAYOUTS)
@pytest.mark.parametrize("stop", [BEST, *(slow_case(step) for step in (3, 7, 8))])
def test_a_run_that_was_stopped_ends_after_the_same_step(comm, folder, parallel, stop):
    """Stops after 4 and 8 steps come before the tests that are due there."""
    records, values, _ = run(comm, scored(folder / "whole", **parallel))
    config = scored(folder / "again", **parallel)
    first, _, why = run(comm, config, stop=stop)
    assert f"stopped after step {stop} of 16" in why
    rest, again, _ = run(comm, config, go_on=True)
    assert of(Resumed, rest)[0].step == stop
    tests = [of(Epoch, found) for found in (first + rest, records)]
    assert str(tests[0]) == str(tests[1])  # where NaN is as NaN
    assert of(Summary, rest)[0].ended == of(Summary, records)[0].ended
    resumed = f"step-{stop:08d}"  # which stays
    assert names(folder / "again") == sorted({*names(folder / "whole"), resumed})
    equal(again, values)


@pytest.mark.quick_on(2)
def test_a_run_that_has_ended_does_not_go_on_until_it_has_more_patience(comm, folder):
    run(comm, scored(folder, every=0))
    records, _, _ = run(comm, scored(folder, every=0), go_on=True)
    assert not of(Epoch, records)
    assert of(Summary, records)[0].ended.startswith("no better higher score in 3 tests")
    records, _, _ = run(comm, scored(folder, every=0, patience=4), go_on=True)
    assert len(of(Epoch, records)) == 3
    assert of(Summary, records)[0].ended == "all 16 steps are done"
    assert names(folder) == ["best-00000012", f"step-{END:08d}", "step-00000016"]


@pytest.mark.quick_on(2)
def test_a_test_at_an_early_end_within_an_epoch_costs_no_patience(comm, folder):
    """Nor does it cost any at the end of the steps, if a longer run has none there."""
    records, _, _ = run(comm, scored(folder), end=5)
    assert len(of(Epoch, records)) == 3
    config = scored(folder)
    run(comm, replace(config, train=replace(config.train, steps=7)), go_on=True)
    records, _, _ = run(comm, config, go_on=True)
    (summary,) = of(Summary, records)
    assert summary.ended == "no better higher score in 3 tests than 3 after step 4"
    assert of(Step, records)[-1].step == END


@pytest.mark.quick_on(2)
def test_the_newest_is_resumed_and_not_the_best(comm, folder):
    run(comm, scored(folder, every=0), stop=7)
    assert names(folder) == [f"best-{BEST:08d}", "step-00000007"]
    records, _, _ = run(comm, scored(folder, every=0), go_on=True, stop=9)
    assert of(Resumed, records)[0].step == 7
    # A fresh run sets both aside.
    run(comm, scored(folder, every=0), stop=1)
    assert names(folder) == ["earlier", "step-00000001"]
    aside = [f"best-{BEST:08d}", "step-00000007", "step-00000009"]
    assert names(folder, "checkpoints/earlier") == aside


@pytest.mark.quick_on(2)
def test_a_run_that_is_killed_while_it_replaces_the_best_leaves_a_whole_one(
    comm, folder, monkeypatch
):
    class Killed(BaseException):
        pass

    def killed(self, paths):
        if any(path.name.startswith("best-") for path in paths):
            raise Killed

    folder = folder / str(comm.rank)  # rank 0 alone removes, and tells the others nothing
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Writer, "_remove", killed)
        run(MPI.COMM_SELF, scored(folder))
    assert {"best-00000002", f"best-{BEST:08d}"} <= set(names(folder))
    broken = folder / "checkpoints/.best-00000099.unfinished"
    broken.mkdir()
    (broken / "rank-00000.safetensors").write_bytes(b"half of it")
    run(MPI.COMM_SELF, scored(folder), go_on=True)
    assert names(folder) == [f"best-{BEST:08d}", f"step-{BEST:08d}", f"step-{END:08d}"]
