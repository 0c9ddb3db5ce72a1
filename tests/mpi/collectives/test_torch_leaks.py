"""Groups, storages and steps of torch by the thousand, by the process's own numbers."""

import gc
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from collectives.torch import reductions

pytestmark = [pytest.mark.slow, pytest.mark.at_most(2), pytest.mark.usefixtures("world")]


@pytest.fixture
def ranks(world):
    return world.size()


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


def test_ten_thousand_groups_leave_nothing(ranks):
    tensor = torch.ones(3)

    def turn(number):
        group = dist.new_group()
        dist.all_reduce(tensor.fill_(1), group=group, async_op=number % 2 == 0)
        dist.barrier(group)
        assert tensor.tolist() == [ranks] * 3
        dist.destroy_process_group(group)

    grown(turn, 500, 10_000, 20)


def test_groups_with_shared_memory_leave_nothing(ranks):
    def turn(number):
        group, tensor = dist.new_group(), torch.ones(40_000)
        for _ in range(2):
            dist.all_reduce(tensor, group=group)
        assert tensor[-1] == ranks**2
        dist.destroy_process_group(group)

    grown(turn, 50, 500, 20)


def test_ten_thousand_storages_leave_nothing(ranks, monkeypatch):
    monkeypatch.setattr(reductions, "is_called_by_reducer", lambda: True)

    def turn(number):
        tensor = torch.empty(40_000 + 512 * (number % 3))
        for _ in range(3):  # which moves it
            dist.all_reduce(tensor.fill_(number))
        assert tensor[0] == tensor[-1] == number * ranks

    grown(turn, 500, 10_000, 20)


@pytest.mark.parametrize("views", [False, True])
def test_three_thousand_steps_of_ddp_leave_nothing(ranks, views):
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
