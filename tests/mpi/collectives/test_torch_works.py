"""Works, futures and tensors of ``torch.distributed`` that C++ reads, or torch itself has made."""

import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from mpi4py import MPI
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel

from tests.mpi.collectives.forms import LAST, LEFT, RANK, RIGHT, P

pytestmark = [pytest.mark.quick_on(2, 3), pytest.mark.usefixtures("world")]
SIZES = [5, 50_000]
REFUSED = "single memory location"


def failing(group):
    return dist.all_reduce(torch.ones(1).expand(4), group=group, async_op=True)


def ended(group):
    """Who only reads a future may drop its error, so the end of the group has it, too."""
    with pytest.raises(RuntimeError, match=REFUSED):
        dist.destroy_process_group(group)


@pytest.mark.parametrize("who", ["C++", "a callback", "nobody", "nobody with a future", "asks"])
def test_an_error_is_raised_for_who_reads_its_future_and_at_the_end_of_the_group(who):
    work = failing(group := dist.new_group())
    if who == "asks":
        while not work.is_completed():
            time.sleep(1e-3)
    elif who != "nobody":
        future = work.get_future()
        if who == "a callback":
            future = future.then(lambda done: done.value())
        if who in ("C++", "a callback"):
            with pytest.raises(RuntimeError, match=REFUSED):
                torch.futures.collect_all([future]).wait()
    dist.all_reduce(after := torch.ones(2), group=group)
    assert after.tolist() == [P] * 2
    ended(group)


def test_the_value_of_an_all_gather_is_its_list():
    parts = [torch.zeros(3) for _ in range(P)]
    work = dist.all_gather(parts, torch.full((3,), float(RANK)), async_op=True)
    value = work.get_future().then(lambda future: torch.stack(future.value())).wait()
    assert value[:, 0].tolist() == list(range(P))
    assert [one.data_ptr() for one in work.result()] == [one.data_ptr() for one in parts]


def test_a_rank_that_only_sends_writes_nothing_back():
    """Its tensor may be one number many times, or memory that nobody may write to."""
    one = torch.tensor(3.0).expand(8)
    dist.broadcast(one if RANK == LAST else (got := torch.zeros(8)), LAST)
    dist.reduce(one if RANK < LAST else (total := torch.full((8,), 3.0)), LAST)
    assert (total == 3 * P).all() if RANK == LAST else (got == 3).all()


def test_ddp_raises_the_error_of_a_sum():
    group = dist.new_group()

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return failing(group).get_future()

    net = DistributedDataParallel(torch.nn.Linear(2, 1))
    net.register_comm_hook(None, hook)
    with pytest.raises(RuntimeError, match=REFUSED):
        net(torch.ones(1, 2)).sum().backward()
    ended(group)


@pytest.mark.parametrize("items", SIZES)
@pytest.mark.parametrize("waits_first", [False, True])
def test_wait_tensor_waits_for_calls_in_flight(items, waits_first):
    known = torch._C._distributed_c10d._get_work_registry_size()
    for call in (dist.all_reduce, lambda x, **how: dist.broadcast(x, LAST, **how)):
        tensor = torch.full((items,), RANK + 1.0)
        with functional.allow_inflight_collective_as_graph_input_ctx():
            MPI.COMM_WORLD.Barrier()
            time.sleep(0.1 * (RANK == LAST))
            work = call(tensor, async_op=True)
        if waits_first:
            work.wait()
        del work
        functional.wait_tensor(tensor)
        assert tensor[-1] == (sum(range(1, P + 1)) if call is dist.all_reduce else P)
    assert torch._C._distributed_c10d._get_work_registry_size() == known


@pytest.mark.parametrize("items", SIZES)
def test_results_of_functional_collectives_are_taken(items):
    def tensor():
        return functional.all_reduce(torch.ones(items), "sum", dist.group.WORLD)

    dist.all_reduce(total := tensor())
    assert total[-1] == P * P
    dist.all_gather_into_tensor(whole := torch.empty(P * items), tensor())
    assert (whole == P).all()
    dist.all_gather(parts := [torch.empty(items) for _ in range(P)], tensor())
    assert all((part == P).all() for part in parts)
    work = dist.isend(tensor(), RIGHT)
    dist.recv(received := torch.empty(items), LEFT)
    work.wait()
    assert (received == P).all()


@pytest.mark.parametrize("items", SIZES)
def test_calls_on_tensors_without_values_return(items):
    with FakeTensorMode():
        dist.all_reduce(tensor := torch.ones(items))
        dist.all_reduce(tensor, async_op=True).wait()
        dist.all_gather([torch.empty(items)] * P, tensor)
        dist.recv(tensor, LEFT)
    dist.all_reduce(real := torch.ones(1))
    assert real.item() == P


def test_a_call_keeps_the_memory_that_its_tensor_had():
    for _ in range(20):
        tensor = torch.ones(1000)
        work = dist.all_reduce(tensor, async_op=True)
        tensor.data = torch.full((1000,), 7.0)
        others = [torch.zeros(1000) for _ in range(4)]  # which may get memory that is free
        work.wait()
        assert (tensor == 7).all() and not any(other.any() for other in others)
