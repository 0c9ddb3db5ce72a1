"""A job file that names a model, data, a loss, metrics and an optimiser of one's own."""

import json

import pytest
from mpi4py import MPI

import mpitrain
from collectives import Communicator
from mpitrain.commands.arguments import parse
from mpitrain.commands.ranks import evaluate, run
from mpitrain.config import ConfigError, Own, load
from mpitrain.config.own import brought
from mpitrain.metrics.reader import read_records
from mpitrain.metrics.records import Step

pytest.importorskip("torch", reason="torch is not installed: make test TORCH=1")
pytestmark = pytest.mark.at_most(5)

WAVES = """
from dataclasses import dataclass
import torch
import beside

@dataclass
class Waves:
    count: int

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        x = torch.linspace(-1, 1, 4).double() * (index % 16) / 8
        return x, (torch.sin(x).sum() + 0.1 * torch.randn(()))[None]

def data():
    return Waves(60), Waves(20)

def untested():
    return Waves(60), None

def model():
    return torch.nn.Sequential(torch.nn.Linear(4, beside.WIDTH), torch.nn.Tanh(),
                               torch.nn.Linear(beside.WIDTH, 1)).double()

def mae(y, t):
    return (y - t).abs().mean()

loss = torch.nn.functional.mse_loss
metrics = {"mae": mae}

def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=3e-3)

def schedule(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)

def cycle(optimizer):
    one_cycle = torch.optim.lr_scheduler.OneCycleLR
    return one_cycle(optimizer, 0.01, total_steps=12, cycle_momentum=False)

clients = [number % 8 for number in range(60)]
"""
JOB = """
[own]
model = "waves.py:model"
data = "waves.py:data"
loss = "waves.py:loss"
metrics = "waves.py:mae"
optimizer = "waves.py:optimizer"
[run]
dtype = "float64"
dir = "{folder}/run"
[train]
batch_size = 16
epochs = 3
"""


@pytest.fixture
def job(comm, folder):
    if comm.rank == 0:
        (folder / "waves.py").write_text(WAVES)
        (folder / "beside.py").write_text("WIDTH = 8")
        (folder / "job.toml").write_text(JOB.format(folder=folder))
    comm.Barrier()
    return folder / "job.toml"


def last(folder):
    return json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])


def test_it_is_what_python_makes_of_it(comm, folder, job, capfd):
    assert run(["train", str(job), "--set", "train.steps=6"]) == 0
    assert run(["train", str(job), "--resume", "--set", "data.workers=1"]) == 0
    config = load(job, [f"run.dir={folder}/python"])
    with mpitrain.Trainer(comm, config, **brought(config.own)) as trainer:
        tests = trainer.fit()
    capfd.readouterr()
    assert run(["eval", str(job)]) == 0
    told = f"mae {tests[-1].metrics['mae']:.6g}, loss {tests[-1].test_loss:.6f}"
    assert comm.rank or (last(folder)["metrics"] == tests[-1].metrics)
    assert comm.rank or told in capfd.readouterr().out
    # Another job is evaluated where that is allowed by name.
    other, allowed = ["eval", str(job), "--set", "train.batch_size=8"], "--allow-changes"
    assert run(other) == 1
    assert comm.rank or allowed in capfd.readouterr().err
    assert run([*other, allowed]) == 0
    out, err = capfd.readouterr()
    assert comm.rank or (told in out and "train.batch_size was 16, and is 8" in err)


def test_a_job_without_samples_to_test_on(comm, folder, job, capfd):
    words = [str(job), "--set", f"own.data={folder}/waves.py:untested", "--set", 'own.metrics=""']
    assert run(["train", *words]) == 0
    assert run(["eval", *words]) == 2
    assert comm.rank or "there is nothing to test on" in capfd.readouterr().err


def test_eval_within_an_epoch_asks_a_scheduler_for_no_further_step(comm, folder, job):
    own = ["--set", f"own.schedule={folder}/waves.py:cycle"]
    assert run(["train", str(job), *own, "--set", "train.steps=6"]) == 0
    assert run(["eval", str(job), *own]) == 0


@pytest.mark.parametrize("kind", ["iid", "own"])
def test_eval_takes_samples_in_any_order(comm, folder, job, capfd, kind):
    """As of workers with samples of their own, whose number may be another one."""
    split = ["--set", "sync.kind=local", "--set", f"sync.split={kind}"]
    if kind == "own":
        split += ["--set", f"own.clients={folder}/waves.py:clients"]
    assert run(["train", str(job), *split]) == 0
    capfd.readouterr()
    assert run(["eval", str(job), *split]) == 0
    told = f"loss {last(folder)['test_loss']:.6f}"
    assert comm.rank or told in capfd.readouterr().out
    with Communicator(MPI.COMM_SELF) as alone:
        assert evaluate(alone, parse(["eval", str(job), *split])) == 0
    assert told in capfd.readouterr().out


def test_a_scheduler_of_torch(comm, folder, job, capfd):
    """Its rates are in the records; find-lr takes its own in its place."""
    own = ["--set", f"own.schedule={folder}/waves.py:schedule"]
    assert run(["train", str(job), *own, "--set", "train.steps=6"]) == 0
    assert run(["train", str(job), *own, "--resume"]) == 0
    comm.Barrier()
    steps = read_records(folder / "run" / "metrics.jsonl").of(Step)
    expected = {step + 1: 3e-3 * 0.5 ** (step // 5) for step in range(12)}
    assert {one.step: one.lr for one in steps} == pytest.approx(expected)
    assert run(["find-lr", str(job), *own, "--steps", "5"]) == 0
    for refused, why in (
        (["train", str(job), "--set", "optim.schedule_by=epoch"], "is of a schedule of one's own"),
        (["profile", str(job)], "mpitrain profile needs a model and data"),
    ):
        assert run(refused) == 2
        assert comm.rank or why in capfd.readouterr().err


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": "waves"}, r"own.model = 'waves': write module:name or file.py:name"),
        ({"model": "waves.py:modle"}, "waves.py has no 'modle'"),
        ({"model": "wave.py:model"}, "cannot be imported: FileNotFoundError"),
        ({"loss": "no.such:loss"}, "cannot be imported: ModuleNotFoundError: No module named 'no'"),
        ({"data": "waves.py:model"}, "must give .data to train on, data to test on.: "),
    ],
)
def test_what_cannot_be_brought(monkeypatch, folder, job, changed, message):
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=message):
        brought(Own(**changed))
