"""Groups, storages and steps of torch by the thousand, by the process's own numbers."""

import gc
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from collectives.torch import reductions
from tests.mpi.collectives.forms import P

pytestmark = [pytest.mark.slow, pytest.mark.at_most(2), pytest.mark.usefixtures("world")]


def numbers():
    """Threads, descriptors and MiB of this process."""
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    descriptors = len(os.listdir("/proc/self/fd"))
    return int(status["Threads"]), descriptors, int(status["VmRSS"].split()[0]) / 1024


def grown(turn, warm, turns, mib):
    """Runs turns, after which the process is as after the first ones."""
    for number in range(warm):
        turn(number)
    threads, descriptors, before = numbers()
    for number in range(turns):
        turn(number)
    now = numbers()
    assert now[:2] == (threads, descriptors)
    assert now[2] < before + mib


@pytest.mark.parametrize(("items", "warm", "turns"), [(3, 500, 10_000), (40_000, 50, 500)])
def test_thousands_of_groups_leave_nothing(items, warm, turns):
    """The larger sums go through memory that the ranks share."""

    def turn(number):
        group, tensor = dist.new_group(), torch.ones(items)
        dist.all_reduce(tensor, group=group)
        dist.all_reduce(tensor, group=group, async_op=number % 2 == 0)
        dist.barrier(group)
        assert tensor[-1] == P**2
        dist.destroy_process_group(group)

    grown(turn, warm, turns, 20)


def test_ten_thousand_storages_leave_nothing(monkeypatch):
    monkeypatch.setattr(reductions, "is_called_by_reducer", lambda: True)

    def turn(number):
        tensor = torch.empty(40_000 + 512 * (number % 3))
        for _ in range(3):  # which moves it
            dist.all_reduce(tensor.fill_(number))
        assert tensor[0] == tensor[-1] == number * P

    grown(turn, 500, 10_000, 20)


@pytest.mark.parametrize("views", [False, True])
def test_three_thousand_steps_of_ddp_leave_nothing(views):
    net = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Linear(200, 8)),
        bucket_cap_mb=0.05,
        gradient_as_bucket_view=views,
    )
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)

    def turn(number):
        net(torch.ones(4, 200)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    grown(turn, 300, 3000, 5)
