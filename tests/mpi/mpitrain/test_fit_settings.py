"""``mpitrain.Trainer``: its settings, beginning, end and interruption."""

import json
import math
import os
import signal
from contextlib import nullcontext

import numpy as np
import pytest
import torch

import mpitrain
from collectives import Communicator
from mpitrain.checkpoint.manifest import CheckpointError
from mpitrain.config import Config, ConfigError, Data, Model
from mpitrain.data import DataError
from mpitrain.metrics.reader import read_records
from mpitrain.metrics.records import Epoch, Step, Summary
from mpitrain.metrics.sinks import SINKS
from mpitrain.ranks.stop import StopFlag, Stopped
from mpitrain.report import write_report
from mpitrain.run import train
from mpitrain.training.evaluation import evaluate
from mpitrain.training.loop import Batch
from tests.mpi.mpitrain import fits
from tests.mpi.mpitrain.fits import OPTIMIZERS, PARALLEL, Whole, assert_equal, made, net

pytestmark = pytest.mark.at_most(5)


def test_a_trainer_frees_the_communicator_that_it_made(comm, folder, monkeypatch):
    """Also one that was refused; one that it was given stays the program's."""
    closed, close = [], Communicator.close
    monkeypatch.setattr(Communicator, "close", lambda self: (closed.append(self), close(self))[1])
    with made(folder) as trainer:
        assert not closed
    assert any(one is trainer.comm for one in closed)
    closed.clear()
    with pytest.raises(ConfigError, match=f"needs {2 * comm.size} ranks"):
        made(folder, parallel={"pipe": 2 * comm.size})
    assert len(closed) == 1
    closed.clear()
    with made(folder, comm) as trainer:
        assert trainer.comm is comm
    assert not any(one is comm for one in closed)


def test_a_closed_trainer_says_so_and_touches_no_file(comm, folder):
    with made(folder, comm, epochs=1) as trainer:
        trainer.fit()
    kept = sorted((folder / "run" / "checkpoints").iterdir())
    for use in (
        trainer.fit,
        lambda: train(trainer),
        lambda: trainer.loop.step(Batch(0, [np.arange(comm.size)])),
        lambda: evaluate(trainer.parts, 0),
    ):
        with pytest.raises(RuntimeError, match="this trainer is closed"):
            use()
    assert sorted((folder / "run" / "checkpoints").iterdir()) == kept


@pytest.mark.parametrize("zero", [0, 3])
def test_a_trainer_whose_pass_has_failed_trains_no_more(comm, folder, zero):
    """Sums may be under way, and shards gathered; one process without shards goes on."""

    class Fails(torch.nn.Tanh):
        calls = 0

        def forward(self, x):
            if self.training and len(x):
                self.calls += 1
                if self.calls == 9:
                    raise ZeroDivisionError
            return super().forward(x)

    model = lambda: torch.nn.Sequential(*net(6), Fails(), *net())  # noqa: E731
    with made(folder, comm, model=model, parallel={"zero": zero}, epochs=4) as trainer:
        with pytest.raises(ZeroDivisionError):
            trainer.fit()
        if comm.size == 1 and not zero:
            trainer.fit(resume=True)
            return
        with pytest.raises(RuntimeError, match="has failed in a pass"):
            trainer.fit(resume=True)


@pytest.mark.parametrize("way", ["load_state_dict", "data"])
def test_values_that_are_set_too_late_are_not_lost(comm, folder, way):
    with made(folder, comm, model=net) as trainer:
        if way == "data":
            next(trainer.module.parameters()).data.mul_(2)
        else:
            trainer.module.load_state_dict(net().state_dict())
        with pytest.raises(ConfigError, match="parameters were changed after the trainer was made"):
            trainer.fit()


def test_metrics_that_nobody_names_go_by_the_labels(comm, folder):
    means = {"model": lambda: net(3), "loss": lambda y, t: (y.mean(1) - t[:, 0]).square().mean()}
    for given, names in (({}, ["mae"]), (means, []), (fits.SEVERAL, [])):
        with made(folder, comm, **given | {"metrics": None, "epochs": 1}) as trainer:
            assert list(trainer.fit()[-1].metrics) == names
    with pytest.raises(ConfigError, match="accuracy takes one output and one label, and there are"):
        made(folder, comm, **fits.SEVERAL | {"metrics": ["accuracy"]})


def test_settings_may_be_numbers_and_types_of_numpy_and_torch(comm, folder):
    numbers = {"batch_size": np.int64(24), "parallel": {"pipe": np.int32(1)}, "epochs": np.int8(1)}
    for dtype in (torch.float64, np.float64, np.dtype("f8")):
        with made(folder, comm, **numbers, dtype=dtype, device=torch.device("cpu")) as trainer:
            job = trainer.config
        assert (job.train.batch_size, job.run.dtype, job.run.device) == (24, "float64", "cpu")


def test_a_schedule_by_its_name(comm, folder):
    """Schedule of torch's optimiser; it ends with the run."""
    given, found = {"schedule": "cosine", "warmup_steps": 2, "steps": 7}, []
    given |= {"optimizer": OPTIMIZERS["AdamW"], "parallel": PARALLEL}
    with made(folder, comm, **given) as trainer:
        trainer.fit(on_record=lambda one: isinstance(one, Step) and found.append(one))
    falls = [(1 + math.cos(math.pi * (step - 2) / 5)) / 2 for step in range(2, 7)]
    assert [step.lr / 3e-3 for step in found] == pytest.approx([0, 0.5, *falls])
    assert found[-1].memory > 1e6


def test_a_job_file_may_say_more_than_the_program_leaves_to_it(comm, folder):
    config = Config(model=Model(kind="mlp", hidden=(8,)), data=Data(test_fraction=0.5))
    with made(folder, config=config) as trainer:
        assert trainer.config.data.test_fraction == 0.5


def test_a_module_reads_text_that_a_job_names(comm, folder):
    if comm.rank == 0:
        (folder / "text").write_text("the quick brown fox " * 30)
    comm.Barrier()
    text = {"name": "text", "path": str(folder / "text"), "context": 8}

    def model():
        return torch.nn.Sequential(torch.nn.Embedding(16, 4), torch.nn.Linear(4, 16))

    given = {"model": model, "data": text, "optim": {"name": "adam", "lr": 0.05}}
    given["loss"] = {"name": "cross_entropy", "smoothing": 0.1}
    with mpitrain.Trainer(comm, **given, batch_size=8, dir=str(folder / "run")) as trainer:
        assert trainer.config.loss.smoothing == 0.1
        losses = [test.test_loss for test in trainer.fit()]
    assert losses[-1] < 0.8 * losses[0]


def test_a_run_whose_parameters_are_frozen_now_is_not_resumed(comm, folder):
    def frozen():
        module = net()
        module[0].requires_grad_(False)
        return module

    with made(folder, optimizer=OPTIMIZERS["AdamW"], steps=3) as trainer:
        trainer.fit()
    frozen_now = "part0.bias, part0.weight, which the model does not train"
    with pytest.raises(CheckpointError, match=frozen_now):
        made(folder, optimizer=OPTIMIZERS["AdamW"], model=frozen).fit(resume=True)


class NamedByItself:
    """A loss whose name is a method, as its address in memory is another on each rank."""

    def name(self):
        return "mse"

    def __call__(self, outputs, labels):
        return torch.nn.functional.mse_loss(outputs, labels)


def test_ranks_may_say_the_same_in_other_words(comm, folder):
    rate = 0.05 if comm.rank else np.float64(0.05)
    how = {"loss": NamedByItself(), "optimizer": lambda p: torch.optim.SGD(p, lr=rate)}
    with made(folder, **how) as trainer:
        assert trainer.config.own.loss == "NamedByItself"


def test_signals_stop_it_beside_a_flag_of_the_programs_own(comm, folder):
    stop = StopFlag()

    def kill(parts):
        if parts.steps_done == 2 and comm.rank == comm.size - 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    with made(folder, stop=stop, before_step=kill) as trainer:
        with pytest.raises(Stopped, match=r"step 3 of 10 \(signal SIGUSR1\)"):
            trainer.fit()
        assert not stop.reason
        trainer.fit(resume=True)
        assert trainer.parts.steps_done == 10


def test_a_run_goes_on_with_other_cuts(folder):
    """They give the parameters other names in the trainer, and the same ones in the module."""
    for way, every in {"one": [()] * 4, "several": ["blocks", ["blocks.1"], "enter", ()]}.items():
        for steps, cuts in enumerate(every, 1):
            given = {"model": Whole, "cuts": cuts, "steps": steps, "dir": str(folder / way)}
            with made(folder, **given) as trainer:
                trainer.fit(resume=True)
                assert trainer.parts.steps_done == steps
        found = trainer.module
        if way == "one":
            expected = found
    assert_equal(found, expected)


UNTESTED = {"test_data": None, "metrics": None}


def test_it_trains_as_with_a_test(comm, folder):
    with made(folder, parallel=PARALLEL, dir=str(folder / "tested")) as trainer:
        trainer.fit()
        expected = trainer.module
    with made(folder, **UNTESTED, parallel=PARALLEL, steps=3, workers=1) as trainer:
        assert trainer.fit() == []
    with made(folder, **UNTESTED, parallel=PARALLEL) as trainer:
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
    given = dict(train_data=fits.Quadrants(60, 1), loss="cross_entropy", model=lambda: net(4))
    own = dict(optimizer=lambda p: torch.optim.Adam(p, lr=0.01), records=["csv"])
    with made(folder, **UNTESTED, **given, **own, epochs=1) as trainer:
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
