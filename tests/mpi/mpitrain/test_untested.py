"""Jobs without samples to test on: trained as with them, and what goes by tests is refused."""

import json
from contextlib import nullcontext

import pytest

from mpitrain.data import DataError
from mpitrain.metrics.reader import read_records
from mpitrain.metrics.records import Epoch, Summary
from mpitrain.metrics.sinks import SINKS
from mpitrain.report import write_report
from mpitrain.training.evaluation import evaluate
from tests.mpi.mpitrain.fits import PARALLEL, Quadrants, assert_equal, made, net, torch


def without(folder, **changed):
    return made(folder, **({"test_data": None, "metrics": None} | changed))


def test_it_trains_as_with_a_test(comm, folder):
    with made(folder, parallel=PARALLEL, dir=str(folder / "tested")) as trainer:
        trainer.fit()
        expected = trainer.module
    with without(folder, parallel=PARALLEL, steps=3, workers=1) as trainer:
        assert trainer.fit() == []
    with without(folder, parallel=PARALLEL) as trainer:
        assert trainer.fit(resume=True) == []
        assert_equal(trainer.module, expected)
        with pytest.raises(DataError, match="nothing to test on"):
            evaluate(trainer.parts, 0)
    if comm.rank:
        return
    log = read_records(folder / "run" / "metrics.jsonl")
    assert log.of(Epoch) == [] and isinstance(log.records[-1], Summary)
    last = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["test_loss"] is None and not last["tested"] and last["metrics"] == {}
    assert "without a test, after" in write_report(folder / "run").read_text()


def test_records_name_the_programs_own_parts_and_none_of_the_defaults(comm, folder, monkeypatch):
    seen = {}
    tracker = lambda folder, job, done: nullcontext(lambda *_: seen.update(job))  # noqa: E731
    monkeypatch.setitem(SINKS, "csv", tracker)
    given = dict(train_data=Quadrants(60, 1), loss="cross_entropy", model=lambda: net(4))
    own = dict(optimizer=lambda p: torch.optim.Adam(p, lr=0.01), records=["csv"])
    with without(folder, **given, **own, epochs=1) as trainer:
        assert trainer.parts.data.classes == 4  # of the model
        assert trainer.fit() == []
    if comm.rank:
        return
    told = read_records(folder / "run" / "metrics.jsonl").start().config
    names = {"data": "Quadrants", "model": "Sequential", "optimizer": "Adam"}
    assert names.items() <= told["own"].items()
    assert names.items() <= {key[4:]: name for key, name in seen.items()}.items()
    assert (told["optim"]["lr"], told["loss"]["name"]) == (0.01, "cross_entropy")
    defaults = {"name", "momentum", "beta1", "test_fraction", "kind", "channels"}
    assert not any(defaults & told[table].keys() for table in ("optim", "data", "model"))
