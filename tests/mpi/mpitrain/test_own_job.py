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
    assert run(["train", str(job), "--set", f"train.steps={6}"]) == 0
    assert run(["train", str(job), "--resume", "--set", "data.workers=1"]) == 0
    config = load(job, [f"run.dir={folder}/python"])
    with mpitrain.Trainer(comm, config, **brought(config.own)) as trainer:
        tests = trainer.fit()
    capfd.readouterr()
    assert run(["eval", str(job)]) == 0
    told = capfd.readouterr().out
    if comm.rank == 0:
        assert last(folder)["metrics"] == tests[-1].metrics
        assert f"mae {tests[-1].metrics['mae']:.6g}, loss {tests[-1].test_loss:.6f}" in told


def test_eval_of_another_job_is_allowed_by_name(comm, folder, job, capfd):
    assert run(["train", str(job), "--set", "train.steps=6"]) == 0
    other = ["eval", str(job), "--set", "train.batch_size=8"]
    capfd.readouterr()
    assert run(other) == 1
    said = "--allow-changes"
    assert comm.rank or said in capfd.readouterr().err
    assert run([*other, said]) == 0
    out, err = capfd.readouterr()
    if comm.rank == 0:
        assert f"loss {last(folder)['test_loss']:.6f}" in out
        assert "train.batch_size was 16, and is 8" in err


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
    told = capfd.readouterr().out
    assert comm.rank or f"loss {last(folder)['test_loss']:.6f}" in told
    with Communicator(MPI.COMM_SELF) as alone:
        assert evaluate(alone, parse(["eval", str(job), *split])) == 0
    assert f"loss {last(folder)['test_loss']:.6f}" in capfd.readouterr().out


def test_a_scheduler_of_torch(comm, folder, job, capfd):
    """Its rates are in the records; find-lr takes its own in its place."""
    own = ["--set", f"own.schedule={folder}/waves.py:schedule"]
    assert run(["train", str(job), *own, "--set", "train.steps=6"]) == 0
    assert run(["train", str(job), *own, "--resume"]) == 0
    if comm.rank == 0:
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
        rates = {r["step"]: r["lr"] for r in map(json.loads, lines) if r["event"] == "step"}
        expected = [3e-3 * 0.5 ** (step // 5) for step in range(12)]
        assert [rates[step + 1] for step in range(12)] == pytest.approx(expected)
    comm.Barrier()
    assert run(["find-lr", str(job), *own, "--steps", "5"]) == 0
    by_epoch = ["--set", "optim.schedule_by=epoch"]
    assert run(["train", str(job), *by_epoch]) == 2
    assert comm.rank or "is of a schedule of one's own" in capfd.readouterr().err


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
def test_what_cannot_be_brought(folder, job, changed, message):
    given = {
        key: value.replace("waves.py:", f"{folder}/waves.py:") for key, value in changed.items()
    }
    with pytest.raises(ConfigError, match=message):
        brought(Own(**given))


def test_commands_that_import_nothing_say_so(comm, job, capfd):
    assert run(["profile", str(job)]) == 2
    assert comm.rank or "mpitrain profile needs a model and data" in capfd.readouterr().err
