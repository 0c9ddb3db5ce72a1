"""A script of torch's DistributedDataParallel, as people have them, moved here by six lines."""

import difflib
import os
import socket
import subprocess
import sys

import pytest

from tests.launch.programs import needs_torch
from tests.launch.test_examples import pytestmark, run

pytestmark = [*pytestmark, pytest.mark.slow, needs_torch]

#: Knows nothing of ranks: a data set with random transforms, a module, groups of parameters.
TASK = """
import numpy as np, torch
from torch import nn

class Blobs(torch.utils.data.Dataset):
    def __init__(self, count, train, seed):
        rng = np.random.default_rng(seed)
        self.centre = rng.uniform(1, 7, (count, 2)).astype(np.float64)
        y, x = np.mgrid[:8, :8]
        d = (x[None] - self.centre[:, :1, None]) ** 2 + (y[None] - self.centre[:, 1:, None]) ** 2
        self.x = (np.exp(-d / 6) + 0.2 * rng.normal(size=d.shape)).astype(np.float64)[:, None]
        self.train = train

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x, c = torch.from_numpy(self.x[i]), torch.from_numpy(self.centre[i] / 8)
        if self.train and torch.rand(()) < 0.5:
            x, c = x.flip(-1), torch.stack([7 / 8 - c[0], c[1]])
        return x, c

def model():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.1), nn.Linear(128, 16), nn.ReLU(), nn.Linear(16, 2),
    )

def groups(m):
    decay = [p for p in m.parameters() if p.ndim > 1]
    rest = [p for p in m.parameters() if p.ndim <= 1]
    return [{"params": decay, "weight_decay": 0.05}, {"params": rest, "lr": 1e-3}]
"""
SCRIPT = """
import torch, torch.distributed as dist
from contextlib import nullcontext
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from task import *
dist.init_process_group("gloo"); rank, size = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1); torch.manual_seed(0)
m = model().double(); torch.manual_seed(rank)
net = DDP(m)
opt = torch.optim.AdamW(groups(m), lr=2e-3)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, [2e-3, 1e-3], total_steps=8)
train, valid = Blobs(128 * size, True, 1), Blobs(70, False, 2)
sampler = DistributedSampler(train, shuffle=True, drop_last=True)
loader = DataLoader(train, 16, sampler=sampler)
vload = DataLoader(valid, 16, sampler=DistributedSampler(valid, shuffle=False))
for epoch in range(2):
    sampler.set_epoch(epoch); net.train()
    for i, (x, y) in enumerate(loader):
        last = (i + 1) % 2 == 0
        with nullcontext() if last else net.no_sync():
            (nn.functional.mse_loss(net(x), y) / 2).backward()
        if last:
            nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            opt.step(); sched.step(); opt.zero_grad()
    net.eval(); t = torch.zeros(2).double()
    with torch.no_grad():
        for x, y in vload: t += torch.tensor([(net(x) - y).abs().sum(), y.numel()])
    dist.all_reduce(t)
    torch.save({"m": m.state_dict(), "mae": t[0] / t[1]}, f"{rank}.pt")
dist.destroy_process_group()
"""
HERE = {
    "from torch.nn.parallel import DistributedDataParallel as DDP": "from mpi4py import MPI; "
    "from mpitrain.adapters.torch import DistributedDataParallel as DDP",
    'dist.init_process_group("gloo"); rank, size = dist.get_rank(), dist.get_world_size()': (
        "comm = MPI.COMM_WORLD; rank, size = comm.rank, comm.size"
    ),
    "DistributedSampler(train, ": "DistributedSampler(train, size, rank, ",
    "DistributedSampler(valid, ": "DistributedSampler(valid, size, rank, ",
    "dist.all_reduce(t)": "comm.Allreduce(MPI.IN_PLACE, t.numpy())",
    "dist.destroy_process_group()\n": "",
}


def ported():
    text = SCRIPT
    for before, after in HERE.items():
        assert text.count(before) == 1
        text = text.replace(before, after)
    return text


def under_torch(folder, ranks):
    """torch's own, as torchrun starts it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    started = [
        subprocess.Popen(
            [sys.executable, "script.py"],
            cwd=folder,
            env={**common, "MASTER_PORT": port, "RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    assert [process.wait(200) for process in started] == [0] * ranks


def test_at_most_six_lines_change():
    lines = difflib.ndiff(SCRIPT.splitlines(), ported().splitlines())
    assert sum(line.startswith("- ") for line in lines) <= 6


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_trains_as_under_torch(tmp_path, ranks):
    """Dropout, transforms and batch norm are each rank's own there, as here."""
    import torch

    found = []
    for name, text in (("torch", SCRIPT), ("here", ported())):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "task.py").write_text(TASK)
        (folder / "script.py").write_text(text)
        under_torch(folder, ranks) if name == "torch" else run(folder, ranks, "script.py")
        found.append([torch.load(folder / f"{rank}.pt") for rank in range(ranks)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    first, last = found[1][0]["m"], found[1][-1]["m"]
    trained = [name for name in first if "running" not in name]  # of the last batch
    assert all(torch.equal(first[name], last[name]) for name in trained)
