"""``mpitrain certify`` on a job and on scripts, as a user starts it."""

import json

import pytest

from tests.launch.programs import ROOT, needs_launcher, needs_torch, run
from tests.processes import until

JOB = ROOT / "jobs" / "examples" / "digits_mlp.toml"
MISTAKES = {"scale", "drop", "repeat", "stale"}


def certified(folder, *words, ranks=None, status=0):
    told = ("--json", "certificate.json", "--steps", "2")
    arguments = ("-m", "mpitrain", "certify", words[0], *told, *words[1:])
    done = run(folder, *arguments, ranks=ranks, seconds=600)
    assert done.returncode == status, done.stdout + done.stderr
    return json.loads((folder / "certificate.json").read_text())


def test_a_job_passes_in_its_layouts_and_planted_mistakes_do_not(tmp_path):
    layouts = ("pipe=2,zero=2", "tensor=2")
    found = certified(tmp_path, JOB, "--virtual", 2, "--mutate", "--layouts", *layouts)
    assert (found["verdict"], found["numbers"]) == ("PASS", "float64")
    rows = {(row["layout"], row["mutation"]): row["verdict"] for row in found["rows"]}
    assert rows == {
        (words, mistake): "FAIL" if mistake else "PASS"
        for words in layouts
        for mistake in ("", *MISTAKES)
    }
    assert not [*tmp_path.glob(".certify-*")]


@pytest.mark.slow
def test_one_rank_alone_proves_nothing(tmp_path):
    (row,) = certified(tmp_path, JOB, status=4)["rows"]
    assert row["verdict"] == "ABSTAIN" and "nothing is compared" in row["text"]
    assert row["repeat"].startswith("mpirun -n 2 mpitrain certify ")


SCRIPT = """
import sys
import torch, torch.distributed as dist
from torch.nn import Dropout, EmbeddingBag, Linear, Sequential
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("mpi")
torch.manual_seed(0)
is_sparse = sys.argv[2:] == ["sparse"]
x = torch.arange(64)[:, None] % 8 if is_sparse else torch.randn(64, 8)
data = TensorDataset(x, x.sin().sum(1, keepdim=True))
first = EmbeddingBag(8, 16, sparse=True) if is_sparse else Linear(8, 16)
net = Sequential(first, Dropout(float(sys.argv[1])), Linear(16, 1))
model = DistributedDataParallel(net)
kind = torch.optim.SGD if is_sparse else torch.optim.AdamW
optimizer = kind(model.parameters(), lr=0.01)
for inputs, targets in DataLoader(data, 8, sampler=DistributedSampler(data)):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    if sys.argv[2:] == ["wrong"]:
        model.module[0].weight.grad *= dist.get_world_size()
    if not is_sparse:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
"""


@pytest.mark.slow
@needs_launcher
@needs_torch
@pytest.mark.parametrize(
    ("options", "words", "status", "where", "text"),
    [
        (["--mutate"], "0", 0, "", "2 steps"),
        ([], "0 sparse", 0, "", "2 steps"),
        ([], "0 wrong", 3, "gradients of step 1", "0.weight is 2 of one process's"),
    ],
)
def test_a_script_with_a_batch_a_rank(tmp_path, options, words, status, where, text):
    """Clipping and AdamW hide the factor from the losses."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    found = certified(tmp_path, script, *options, "--", *words.split(), ranks=2, status=status)
    first, *others = found["rows"]
    assert first["where"] == where and text in first["text"]
    assert {row["mutation"] for row in others} == (MISTAKES if options else set())
    assert {row["verdict"] for row in others} <= {"FAIL"}
    assert first["repeat"].endswith(f"--steps 2 -- {words}")


@pytest.mark.slow
@needs_launcher
@needs_torch
def test_a_rank_that_dies_leaves_no_folder(tmp_path):
    script = tmp_path / "script.py"
    dies = "import os\nif dist.get_world_size() > 1 == dist.get_rank(): os.kill(os.getpid(), 9)"
    script.write_text(SCRIPT.replace("torch.manual_seed", f"{dies}\ntorch.manual_seed"))
    arguments = ("-m", "mpitrain", "certify", script, "--steps", "2", "--", "0")
    assert run(tmp_path, *arguments, ranks=2, seconds=600).returncode
    assert until(lambda: not [*tmp_path.glob(".certify-*")])
