"""One rank that leaves alone, on every road: the job ends soon, with a reason, and never well."""

import time

import pytest

from tests.cases import slow_case
from tests.launch.programs import needs_launcher, needs_torch, run_text

pytestmark = [needs_launcher, needs_torch]
#: A rank raises at one place, once the trainer has been made where that place comes in fit().
PROGRAM = """
import sys, time
import torch
from mpi4py import MPI
import mpitrain
from torch.nn.parallel import DistributedDataParallel

place, kind, catches, when = sys.argv[1:]
rank, made = MPI.COMM_WORLD.rank, []
who = 0 if place == "schedule" else 1  # rank 0 alone calls that one
class Own(BaseException): pass
class Slotted(Exception):
    __slots__ = ()
    def __setattr__(self, name, value): raise AttributeError(name)
ERRORS = {
    "exit": SystemExit(), "zero": SystemExit(0), "three": SystemExit(3), "text": SystemExit("bye"),
    "whole": SystemExit(256), "interrupt": KeyboardInterrupt(), "generator": GeneratorExit(),
    "own": Own("only here"), "key": KeyError("only here"), "assert": AssertionError("only here"),
    "value": ValueError("only here"), "config": mpitrain.ConfigError("only here"),
    "iteration": StopIteration("only here"), "slots": Slotted("only here"),
    "memory": MemoryError("only here"), "mpi": MPI.Exception(MPI.ERR_OTHER),
}

def fails(here):
    if here == place and rank == who and (when == "making" or made):
        print("begun", time.time(), flush=True)
        raise ERRORS[kind]

def loss(outputs, labels):
    fails("loss")
    return torch.nn.functional.mse_loss(outputs, labels)

def metric(outputs, labels):
    fails("metric")
    return (outputs - labels).abs().mean()

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)
        fails("model")
    def forward(self, x):
        fails("forward")
        return self.linear(x)

class Data(torch.utils.data.Dataset):
    def __len__(self):
        fails("length")
        return 16
    def __getitem__(self, i):
        fails("sample")
        return torch.ones(3) * i, torch.ones(1)

def optimizer(parameters):
    fails("optimizer")
    return torch.optim.Adam(parameters)

def schedule(step):
    fails("schedule")
    return 1.0

def before(parts):
    fails("callback")

def train():
    trainer = mpitrain.Trainer(
        model=Net, train_data=Data(), test_data=Data(), loss=loss, metrics={"m": metric},
        optimizer=optimizer, schedule=schedule, before_step=before,
        batch_size=8, epochs=3, dir="run", log_every=1000,
    )
    made.append(True)
    trainer.fit()

def loop():
    torch.distributed.init_process_group("collectives", "mpi://")
    net = DistributedDataParallel(torch.nn.Linear(3, 1))
    made.append(True)
    step = torch.optim.SGD(net.parameters(), lr=0.1)
    if place == "hook":
        net.module.weight.register_hook(lambda g: fails("hook"))
    for _ in range(3):
        step.zero_grad()
        fails("loop")
        net(torch.ones(2, 3)).sum().backward()
        step.step()

try:
    loop() if place in ("hook", "loop") else train()
except (Exception if catches == "some" else BaseException) as error:
    if catches == "nothing":
        raise
    print("caught", type(error).__name__, error, flush=True)
MPI.COMM_WORLD.Barrier()
print("the end", flush=True)
"""


MAKING = ("model", "loss", "forward", "length", "sample", "optimizer", "schedule")
FITTING = ("loss", "forward", "sample", "metric", "callback")
KINDS = (
    "exit", "key", "zero", "own", "text", "assert", "interrupt", "three", "generator", "config",
    "whole", "slots", "iteration", "memory", "mpi", "value",
)  # fmt: skip
CATCHES = ("all", "nothing", "some")
#: Two errors at each place.
CASES = [
    (place, KINDS[(5 * number + shift) % len(KINDS)], CATCHES[(number + shift) % 3], when)
    for when, places in (("making", MAKING), ("fitting", FITTING))
    for number, place in enumerate(places)
    for shift in (0, 7)
]
#: In a loop of one's own and on the way back, what the program catches is its own business.
CASES += [(place, kind, "nothing", "fitting") for place in ("loop", "hook") for kind in KINDS[:4]]
CASES += [("loop", "three", "nothing", "fitting")]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_an_error_of_one_rank_ends_the_job_or_is_one_of_all(tmp_path, case):
    ended = run_text(tmp_path, PROGRAM, *case, ranks=2)
    over = time.time()
    begun = [line.split()[1] for line in ended.stdout.splitlines() if line.startswith("begun")]
    assert begun, ended.stderr
    if ended.returncode == 0:  # all ranks have had it, and caught it
        assert ended.stdout.count("caught") == 2, ended.stdout + ended.stderr
        return
    assert over - float(begun[-1]) < 60
    reasons = ("rank 0 of 2", "rank 1 of 2", "all 2 ranks", "cannot end without rank 1")
    assert any(reason in ended.stderr for reason in reasons), ended.stderr
    if case[:2] in (("loop", "exit"), ("loop", "three")):  # the others have begun a step
        assert ended.returncode == 1 and "the end" not in ended.stdout
        assert "rank 1 on " in ended.stderr and reasons[-1] in ended.stderr
        assert "has ended: its program is over" in ended.stderr


SKIPS = """
import torch
from mpi4py import MPI
import mpitrain

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)
    def forward(self, x):
        chosen, found = x[:, 0] > 1.2, 2 * x
        if chosen.any():
            found[chosen] = self.norm(x[chosen])
        return self.linear(found)

torch.manual_seed(0)
data = [(torch.randn(3), torch.zeros(1)) for _ in range(64)]
mpitrain.Trainer(
    model=Net(), train_data=data, loss=torch.nn.MSELoss(), batch_size=8, epochs=4,
    optimizer=lambda p: torch.optim.SGD(p, 0.01),
).fit()
"""


@pytest.mark.slow
def test_replicas_of_which_one_skips_a_norm_are_named(tmp_path):
    ended = run_text(tmp_path, SKIPS, ranks=2)
    assert ended.returncode == 1
    assert "waits in #" in ended.stderr and "has left a collective out" in ended.stderr


BRANCHES = """
import sys
import torch
from mpi4py import MPI
import mpitrain

when, does = sys.argv[1:]
made = []

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
    def forward(self, x):
        h = self.up(x)  # as by its own part of them
        if MPI.COMM_WORLD.rank and h.shape[-1] == 8 and (when == "making" or made):
            if does == "raises":
                raise ValueError("features of this rank alone")
            h = self.up(self.down(h))
        return self.down(h)

torch.manual_seed(0)
trainer = mpitrain.Trainer(
    model=torch.nn.Sequential(Block()), train_data=[(torch.randn(8), 1)] * 64, batch_size=4,
    splits={"up": "columns", "down": "rows"}, parallel={"tensor": 2}, epochs=4,
    loss=torch.nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, 0.1),
)
made.append(True)
trainer.fit()
"""


@pytest.mark.slow
@pytest.mark.parametrize("does", ["raises", "branches"])
@pytest.mark.parametrize("when", ["making", "fitting"])
def test_tensor_ranks_of_which_one_goes_another_way_are_named(tmp_path, when, does):
    ended = run_text(tmp_path, BRANCHES, when, does, ranks=2)
    assert ended.returncode == 1
    # Or messages of other sizes meet, and the MPI library says so.
    reasons = "cannot end", "truncated", "wait for this one"
    assert any(reason in ended.stderr for reason in reasons), ended.stderr
    assert ("features of this rank alone" in ended.stderr) == (does == "raises"), ended.stderr


STOPPED = """
import os, signal, sys
import numpy as np
from mpi4py import MPI
import mpitrain
from mpitrain import nn

def hears(parts):
    if parts.steps_done == 2 and MPI.COMM_WORLD.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)

trainer = mpitrain.Trainer(
    model={"linear": nn.Linear(3, 1)}, train_data=[(np.ones(3, "f4"), np.ones(1, "f4"))] * 24,
    loss="mean_squared_error", batch_size=6, epochs=2, dir="run", before_step=hears,
)
try:
    trainer.fit()
except mpitrain.Stopped as error:
    if len(sys.argv) == 1:
        raise
    print("caught:", error, flush=True)
"""


@pytest.mark.parametrize("catches", [False, slow_case(True)])
def test_a_program_that_is_told_to_stop_can_go_on(tmp_path, catches):
    ended = run_text(tmp_path, STOPPED, *["catches"] * catches, ranks=2)
    assert ended.returncode == (0 if catches else 75), ended.stderr
    sentence = "stopped after step 3 of 8 (signal SIGTERM)"
    assert ended.stderr.count(f"{sentence}; fit(resume=True) goes on from there") == 1
    assert ended.stdout.count(f"caught: {sentence}") == 2 * catches
    assert "Traceback" not in ended.stderr
    assert (tmp_path / "run" / "checkpoints" / "step-00000003").is_dir()


@pytest.mark.parametrize(
    ("right", "wrong", "status", "told"),
    [
        slow_case("batch_size=6", "batch_size=0", 2,
         "mpitrain: train.batch_size: expected a whole number >= 1, got 0 ({line})\n"),
        slow_case("batch_size", "batchsize", 2,
         " setting of a job; did you mean batch_size? ({line})\n"),
        ("parts.steps_done", "parts.no_such_name", 1, "[all 2 ranks] Traceback"),
    ],
)  # fmt: skip
def test_an_error_of_all_ranks_is_written_once(tmp_path, right, wrong, status, told):
    """A wrong setting is one sentence, with the line of the program."""
    ended = run_text(tmp_path, STOPPED.replace(right, wrong), ranks=2)
    line = STOPPED.splitlines().index("trainer = mpitrain.Trainer(") + 1
    told = told.format(line=f"{tmp_path}/program.py:{line}")
    assert ended.returncode == status and ended.stderr.count(told) == 1, ended.stderr
    assert ("Traceback" in ended.stderr) == (status == 1)
