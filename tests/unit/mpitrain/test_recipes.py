"""A run goes on with the job that it was begun with, and with another one only if told so."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from mpi4py import MPI

import mpitrain
from mpitrain.checkpoint.described import Description
from mpitrain.checkpoint.manifest import CheckpointError
from mpitrain.checkpoint.recipe import Recipe, _add
from mpitrain.checkpoint.saving import resume
from mpitrain.metrics.reader import read_records
from mpitrain.metrics.records import Resumed

torch = pytest.importorskip("torch", reason="torch is not installed: make test TORCH=1")
torch.set_num_threads(1)
nn = torch.nn

#: A program, as text, since what is compared is its code; each change replaces some of it.
PROGRAM = '''
import functools
import torch
from torch import nn

SLOPE = 0.1

def bent(x, by=0.5):
    """Docstrings have no part in it."""
    return torch.where(x > 0, x, SLOPE * x * by)

class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.w = nn.Parameter(torch.randn(3, 4, generator=draw), requires_grad=False)
        self.register_buffer("c", torch.full((4,), 1.5))
        self.power = 1.0
        self.norm = nn.BatchNorm1d(4, eps=1e-5)
        self.inner = Inner()

    def forward(self, x):
        return self.inner(self.norm(bent(x @ self.w) * self.c ** self.power))

class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.kind = "mean"
        self.plus = torch.tensor(2.0)

    def forward(self, x):
        return self.shifted(x) if self.kind == "mean" else x

    def shifted(self, x):
        return x + self.plus

    def extra_repr(self):
        return "any text"

def hook(module, args, output):
    return output * 1.0

def model():
    found = nn.Sequential(Frozen(), nn.Tanh(), nn.Dropout(0.1), nn.Linear(4, 1))
    found[1].register_forward_hook(hook)
    return found

def made_loss(weight):
    def loss(prediction, y):
        return weight * (prediction - y).square().mean()
    return loss

loss = made_loss(1.0)

def mae(prediction, y):
    return (prediction - y).abs().mean()

def scaled(x, by):
    return x * by

class Data(torch.utils.data.Dataset):
    def __init__(self):
        draw = torch.Generator().manual_seed(0)
        self.x = torch.randn(32, 3, generator=draw)
        self.y = self.x.sum(1, keepdim=True)
        self.transform = functools.partial(scaled, by=1.0)
        self.calls = 0
        self.path = "/tmp/here"

    def __len__(self):
        return 32

    def __getitem__(self, i):
        if i == 1:
            return self.transform(self.x[i]), self.y[i]
        return self.x[i], self.y[i]

data = Data()
optimizer = lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9)
'''

CHANGES = {
    "manual_seed(1)|manual_seed(2)": "values of model.0.w was float32 of shape (3, 4)",
    "(4,), 1.5|(4,), 2.5": "values of model.0.c was",
    "nn.Tanh()|nn.ReLU()": "model.1 was Tanh, and is ReLU",
    "nn.Tanh()|nn.Hardtanh()": "model.1 was Tanh, and is Hardtanh",
    "Dropout(0.1)|Dropout(0.2)": "model.2.p was 0.1, and is 0.2",
    "eps=1e-5|eps=1e-3": "model.0.norm.eps was 1e-05, and is 0.001",
    "self.power = 1.0|self.power = 2.0": "model.0.power was 1.0, and is 2.0",
    'self.kind = "mean"|self.kind = "no"': "model.0.inner.kind was 'mean', and is 'no'",
    "torch.tensor(2.0)|torch.tensor(3.0)": "values of model.0.inner.plus was",
    "x + self.plus|x - self.plus": "code of model.0.inner.shifted was",
    "@ self.w)|@ -self.w)": "code of model.0.forward was",
    "SLOPE = 0.1|SLOPE = 0.2": "SLOPE was 0.1, and is 0.2",
    "by=0.5|by=0.6": "by was 0.5, and is 0.6",
    "x > 0|x > 1": "code of model.0.forward.bent was",
    "output * 1.0|output * 2.0": "code of model.1.forward_hooks.0 was",
    "found[1].register|found[3].register": "code of model.1.forward_hooks.0 was",
    "made_loss(1.0)|made_loss(2.0)": "loss.weight was 1.0, and is 2.0",
    ".square().mean()|.square().sum()/len(y)": "code of loss was",
    ".abs().mean()|.abs().mean() * 2": "code of metrics.mae was",
    "by=1.0|by=2.0": "data.transform.keywords.by was 1.0, and is 2.0",
    "return x * by|return x + by": "code of data.transform was",
    "if i == 1|if i != 1": "code of data.__getitem__ was",
    "momentum=0.9|momentum=0.8": "optimizer.momentum was 0.9, and is 0.8",
    "lr=0.02, momentum|weight_decay=0.1, lr=0.02, momentum": "optimizer.weight_decay was 0",
    "optim.SGD(p, lr=0.02, momentum=0.9)|optim.Adam(p)": "own.optimizer was SGD, and is Adam",
}

#: What decides on no number, or may change.
HARMLESS = [
    "|",
    "Docstrings have|Text has",
    "any text|other text",
    "lr=0.02|lr=0.01",
    "lr=0.02|foreach=False, lr=0.02",
    "/tmp/here|/tmp/there",
    "self.calls = 0|self.calls = 7",
    "import functools|import functools, sys",
    "def scaled(x, by):|# a comment\ndef scaled(x, by):",
]


def program(change="|", name="first.py"):
    before, after = change.split("|")
    text = PROGRAM.replace(before, after) if before else PROGRAM
    assert text != PROGRAM or change == "|"
    found = {"__name__": "__main__"}
    exec(compile(text, name, "exec"), found)
    return found


def trainer(folder, brings, **given):
    given = {"batch_size": 8, "epochs": 2, **given}
    return mpitrain.Trainer(
        MPI.COMM_SELF,
        model=brings["model"],
        train_data=brings["data"],
        test_data=brings["data"],
        loss=brings["loss"],
        metrics={"mae": brings["mae"]},
        optimizer=brings["optimizer"],
        run={"dir": str(folder), "log_every": 1000, "seed": 3},
        **given,
    )


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The folder of a run of two epochs, and its trainer's module after three."""
    folder = tmp_path_factory.mktemp("run")
    with trainer(folder, program(), epochs=3) as whole:
        whole.fit()
    with trainer(folder, program()) as one:
        one.fit()
    return folder, whole.module


def copied(folder, tmp_path):
    """A folder for a run that goes on from that one's checkpoints."""
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    return copy


def assert_the_same(module, other):
    wanted = other.state_dict()
    for name, found in module.state_dict().items():
        assert torch.equal(found, wanted[name]), name


SOME = {
    "nn.Tanh()|nn.ReLU()",
    "(4,), 1.5|(4,), 2.5",
    "x > 0|x > 1",
    "made_loss(1.0)|made_loss(2.0)",
}


@pytest.mark.parametrize(
    "change", [pytest.param(c, marks=() if c in SOME else pytest.mark.slow) for c in CHANGES]
)
def test_one_change_is_refused_by_its_name(begun, change):
    folder, _ = begun
    other = trainer(folder, program(change, "second.py"), epochs=3)
    with other, pytest.raises(CheckpointError) as refused:
        resume(other.parts)
    assert CHANGES[change] in str(refused.value), str(refused.value)
    assert "--allow-changes" in str(refused.value)


@pytest.mark.parametrize("change", HARMLESS)
def test_what_decides_on_nothing_is_no_other_job(begun, change):
    folder, _ = begun
    with trainer(folder, program(change, "moved/second.py"), epochs=3) as one:
        assert resume(one.parts).notes == []


def test_the_same_program_goes_on_bit_by_bit_and_another_one_where_it_is_allowed(begun, tmp_path):
    folder, whole = begun
    with trainer(copied(folder, tmp_path / "same"), program("|", "second.py"), epochs=3) as one:
        one.fit(resume=True)
    assert_the_same(one.module, whole)
    other = copied(folder, tmp_path / "other")
    changed = trainer(other, program("nn.Tanh()|nn.ReLU()"), epochs=3)
    said = r"model\.1 was Tanh, and is ReLU; set"
    with changed, pytest.raises(CheckpointError, match=said):
        changed.fit(resume=True)
    with trainer(other, program("nn.Tanh()|nn.ReLU()"), epochs=3) as one:
        assert len(one.fit(resume=True, allow_changes=True)) == 1
    (resumed,) = read_records(other / "metrics.jsonl").of(Resumed)
    assert resumed.notes == ["goes on with another job: model.1 was Tanh, and is ReLU"]
    # What it has written is a checkpoint of the other job.
    with trainer(other, program("nn.Tanh()|nn.ReLU()"), epochs=4) as one:
        assert resume(one.parts).notes == []


def test_code_of_another_python_is_not_compared(begun, tmp_path):
    folder, _ = begun
    copy = copied(folder, tmp_path)
    (manifest,) = (copy / "checkpoints").glob("step-*/manifest.json")
    text = msgspec.json.decode(manifest.read_bytes())
    text["recipe"]["bytecode"] = "of another"
    manifest.write_bytes(msgspec.json.encode(text))
    with trainer(copy, program("x > 0|x > 1"), epochs=3) as one:
        (note,) = resume(one.parts).notes
    assert "code was not compared" in note


@pytest.mark.slow
def test_a_recipe_does_not_depend_on_the_order_of_sets():
    """In which a process has names is drawn anew in each."""
    script = (
        "from tests.unit.mpitrain.test_recipes import program\n"
        "from mpitrain.checkpoint.described import Description\n"
        "found, brings = Description(), program()\n"
        "for name in ('model', 'loss', 'mae', 'data'): found.add(name, brings[name])\n"
        "found.add('module', brings['model']())\n"
        "print(sorted(found.options.items()), sorted(found.code.items()), len(found.parts))"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[3],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1


def test_objects_of_any_kind_are_told():
    """Loops, and things that fail when they are looked at, end nowhere."""

    class Odd:
        def __getattr__(self, name):
            raise ZeroDivisionError(name)

        def __call__(self, x):
            return self.me(x)

    loop = [1, 2]
    loop.append(loop)
    odd = Odd()
    odd.me = odd
    found = Description()
    for number, what in enumerate((loop, odd, {"a": loop}, np.ones(2), len, int, sys, (), b"x")):
        _add(found, f"thing{number}", what)
    assert "values of thing3" in found.parts


def test_what_a_program_changes_as_it_runs_is_no_part_of_the_job(tmp_path):
    """Counters, caches and logs of a data set, a loss and a metric; the trainer that one holds;
    when the program began."""
    seen = []

    class Counts(torch.utils.data.Dataset):
        def __init__(self):
            self.read, self.cache, self.began = 0, {}, time.time()

        def __len__(self):
            return 16

        def __getitem__(self, index):
            self.read += 1
            self.cache[self.read] = [index, time.time() - self.began]
            return torch.full((3,), float(index)), torch.ones(1)

    class Logged:
        def __init__(self):
            self.calls, self.kept, self.trainer = 0, [], None

        def __call__(self, outputs, labels):
            self.calls += 1
            self.kept.append(Logged)
            seen.append(len(self.kept))
            return (outputs - labels).square().mean()

    loss, metric = Logged(), Logged()
    for epochs, workers, resumes in ((1, 1, False), (2, 0, True), (3, 0, True)):
        data = Counts()
        for _ in range(3 * epochs):
            data[0]
        job = mpitrain.Trainer(
            MPI.COMM_SELF,
            model=lambda: nn.Linear(3, 1),
            train_data=data,
            test_data=Counts(),
            loss=loss,
            metrics={"own": metric},
            batch_size=8,
            epochs=epochs,
            workers=workers,
            run={"dir": str(tmp_path / "run")},
        )
        metric.trainer = loss.trainer = job
        job.fit(resume=resumes)
        job.close()


def test_differences_are_those_that_both_have_first():
    before = Recipe({"a": "1", "gone": "x"}, {"o": "1", "old": "2"}, {"code of f": "1"}, "py")
    now = Recipe({"a": "2", "new": "y"}, {"o": "1"}, {"code of metrics.f": "1"}, "py")
    assert list(before.differences(now)) == [
        ("a", "1", "2"),
        ("gone", "x", "nothing"),
        ("new", "nothing", "y"),
        ("code of f", "1", "nothing"),
    ]
