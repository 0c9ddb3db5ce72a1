"""Signs of faults of programs on ``torch.distributed``: events, timeouts, checks of replicas."""

import gc
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.profiler import ProfilerActivity, profile

from collectives.torch.backend import backend_of
from collectives.torch.replicas import check_replicas
from tests.cases import slow_case
from tests.mpi.collectives.forms import LAST, LEFT, RANK, RIGHT, P

pytestmark = [pytest.mark.quick_on(3), pytest.mark.usefixtures("world")]


def test_calls_are_events_of_the_profiler():
    tensor, all_of_it = torch.ones(3, 4), torch.empty(3 * P, 4)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        dist.all_reduce(tensor)
        works = [dist.all_reduce(tensor[0], async_op=True) for _ in range(2)]
        for work in works:
            work.wait()
        dist.all_gather_into_tensor(all_of_it, tensor)
        work = dist.isend(tensor[:, :2].contiguous(), RIGHT)
        dist.recv(torch.empty(3, 2), LEFT)
        work.wait()
    dist.all_reduce(tensor)
    events = [(e.name, e.input_shapes) for e in seen.events() if e.name.startswith("collectives:")]
    assert sorted(events) == [
        ("collectives:all_gather_single", [[3, 4]]),
        ("collectives:all_reduce", [[3, 4]]),
        ("collectives:all_reduce", [[4]]),
        ("collectives:all_reduce", [[4]]),
        ("collectives:recv", [[3, 2]]),
        ("collectives:send", [[3, 2]]),
    ]


@pytest.mark.parametrize("names_all", [slow_case(False), True])
def test_a_monitored_barrier_names_the_rank_that_is_late(world, names_all):
    is_late = RANK == LAST > 0
    if is_late:
        MPI.COMM_WORLD.Barrier()
    words = "rank 0" if RANK else f"Rank {LAST} failed"
    if LAST:
        with pytest.raises(RuntimeError, match=words):
            world.monitored_barrier(timedelta(seconds=0.5), wait_all_ranks=names_all)
    if not is_late:
        MPI.COMM_WORLD.Barrier()
    world.monitored_barrier(timedelta(seconds=60), wait_all_ranks=names_all)


@pytest.mark.mpi(min_size=2)
def test_who_is_late_to_a_monitored_barrier_is_late_to_that_of_the_next_group():
    for _ in range(2):
        group = dist.new_group()
        if RANK == LAST:
            MPI.COMM_WORLD.Barrier()
        with pytest.raises(RuntimeError, match="rank 0" if RANK else "failed"):
            backend_of(group).monitored_barrier(timedelta(seconds=0.5))
        if RANK < LAST:
            MPI.COMM_WORLD.Barrier()
        dist.destroy_process_group(group)


def test_groups_are_checked_in_detail():
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = dist.new_group()
    dist.set_debug_level(level)
    gc.collect()
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [P] * 2
    dist.destroy_process_group(group)


@pytest.fixture
def module():
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    made[1].bfloat16()
    return made


def raises(module, name):
    """The error, which all ranks must have, or none on one rank."""
    if P == 1:
        return check_replicas(module)
    with pytest.raises(RuntimeError, match=rf"^{name} is another on ranks \[{LAST}\]"):
        check_replicas(module)


@torch.no_grad()
@pytest.mark.parametrize("name", ["0.weight", "1.bias"])
def test_one_bit_of_one_rank_is_found(module, name):
    check_replicas(module)
    check_replicas(module, dist.new_group(backend="gloo"))
    bits = module.get_parameter(name).view(torch.uint8)
    bits.view(-1)[0] ^= RANK == LAST
    raises(module, name)


@torch.no_grad()
def test_zeros_of_two_signs_differ_and_equal_nans_do_not(module):
    module[0].bias.fill_(float("nan"))
    check_replicas(module)
    module[0].bias.fill_(-0.0 if RANK == LAST else 0.0)
    raises(module, "0.bias")


def test_other_parameters_differ(module):
    if RANK == LAST:
        module.append(torch.nn.Linear(1, 1))
    raises(module, "2.weight")
    if RANK == LAST:
        module[0].weight.data = module[0].weight.data.view(3, 2)  # the same bytes
    raises(module, "0.weight")


def test_a_group_is_compared_alone(module):
    first = dist.new_group([0])
    if RANK == LAST:
        torch.nn.init.zeros_(module[0].weight)
    if RANK == 0:
        check_replicas(module, first)
