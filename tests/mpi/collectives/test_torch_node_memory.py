"""Large calls of ``torch.distributed`` groups through memory that the ranks share."""

from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from collectives import Communicator
from collectives.torch import reductions
from tests.cases import slow_case
from tests.mpi.collectives.forms import LAST, RANK, P

pytestmark = [pytest.mark.quick_on(3), pytest.mark.usefixtures("world")]


@pytest.fixture
def moving(monkeypatch):
    """All sums count as those of DDP's buckets, whose memory moves."""
    monkeypatch.setattr(reductions, "is_called_by_reducer", lambda: True)


def summed(group, tensor):
    """The tensor after as many sums as move it, each of which is right."""
    for _ in range(5):
        dist.all_reduce(tensor.fill_(RANK), group=group)
        assert tensor.min() == tensor.max() == sum(range(P))
    return tensor


def memory_of(group):
    return group._get_backend(torch.device("cpu"))._node_memory


def is_shared(group, tensor):
    near = memory_of(group)._near
    node = near and near._engine.resources.node
    return bool(node) and node.locate(tensor.data_ptr(), tensor.nbytes) is not None


def two_layers():
    """Large enough that their buckets lie in memory that the ranks share."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(200, 300), torch.nn.ReLU(), torch.nn.Linear(300, 200)
    ).double()


def batches(number):
    """For each step, four rows a rank."""
    return torch.randn(number, 4 * P, 200, generator=torch.Generator().manual_seed(1)).double()


def own(batch):
    return batch[4 * RANK :][:4]


@pytest.mark.parametrize("views", [False, True])
def test_buckets_of_ddp_are_shared_by_themselves(group, views):
    module, alone, buckets = two_layers(), two_layers(), []
    net = torch.nn.parallel.DistributedDataParallel(
        module, process_group=group, gradient_as_bucket_view=views
    )
    backend = group._get_backend(torch.device("cpu"))
    summed = backend._sum
    backend._sum = lambda flat, *how: (buckets.append(flat), summed(flat, *how))
    for batch in batches(6):
        net.zero_grad()
        alone.zero_grad()
        net(own(batch)).square().mean().backward()
        alone(batch).square().mean().backward()
        for mine, other in zip(module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-12)
    large = [bucket for bucket in buckets if bucket.nbytes > 1 << 16]
    assert is_shared(group, large[-1]) == (P > 1)
    assert not views or is_shared(group, module[0].weight.grad) == (P > 1)


@pytest.mark.parametrize("turns", [60, slow_case(4000)])
def test_memory_is_another_tensors_after_a_bucket_is_freed(group, moving, turns):
    met, again, moved = set(), 0, 0
    for turn in range(turns):
        length = 40_000 + 512 * (turn % 3)
        tensor = torch.empty(length)
        again += tensor.data_ptr() in met
        met.add(tensor.data_ptr())
        for value in range(1 + turn % 5):
            tensor.fill_(value + RANK + turn)
            dist.all_reduce(tensor, group=group, async_op=True).wait()
            expected = sum(value + r + turn for r in range(P))
            assert tensor[0] == tensor[-1] == tensor.min() == tensor.max() == expected
        moved += is_shared(group, tensor)
    assert again > turns // 10
    assert moved == (3 * turns // 5 if P > 1 else 0)  # those that came three times


def test_ranks_that_disagree_share_nothing(group, monkeypatch):
    monkeypatch.setattr(reductions, "is_called_by_reducer", lambda: RANK == 0)
    assert not is_shared(group, summed(group, torch.empty(50_000))) or P == 1


def test_a_bucket_that_has_moved_refuses_to_be_resized(group, moving):
    """torch would end the process."""
    tensor = summed(group, torch.empty(50_000))
    assert is_shared(group, tensor) == (not tensor.untyped_storage().resizable()) == (P > 1)


def test_memory_that_a_view_of_numpys_names_is_not_moved(group, moving):
    view = (tensor := torch.empty(50_000)).numpy()
    summed(group, tensor)
    assert view[0] == view[-1] == sum(range(P))
    assert not is_shared(group, tensor) or P == 1


def test_buckets_stay_where_they_are_without_room_in_shared_memory(group, moving, monkeypatch):
    full = RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")
    if RANK == LAST:
        monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", Mock(side_effect=full))
    assert not is_shared(group, summed(group, torch.empty(50_000)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_pieces_of_sixteen_bits_are_rounded_once(group, dtype):
    items = 700_001  # in the wider form, more than one piece
    every = [
        torch.randn(items * P, generator=torch.Generator().manual_seed(r)).to(dtype)
        for r in range(P)
    ]
    exact = torch.stack(every).float().sum(0)
    tensor = every[RANK].clone()
    dist.all_reduce(tensor, group=group)
    torch.testing.assert_close(tensor, exact.to(dtype), rtol=2.0**-7, atol=1e-6)
    if P <= 2:  # one sum alone is rounded
        assert torch.equal(tensor, exact.to(dtype))
    out = torch.empty(items, dtype=dtype)
    dist.reduce_scatter_tensor(out, every[RANK], dist.ReduceOp.AVG, group=group)
    expected = (exact / P)[items * RANK :][:items]
    torch.testing.assert_close(out, expected.to(dtype), rtol=2.0**-7, atol=1e-6)


def sharded(group):
    """The layers over the group, by FSDP2."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    from torch.distributed.device_mesh import DeviceMesh

    if not hasattr(fsdp.FSDPModule, "set_allocate_memory_from_process_group_for_comm"):
        pytest.skip("this torch has no such method")
    module, mesh = two_layers(), DeviceMesh.from_group(group, "cpu")
    for part in (module[0], module[2], module):
        fsdp.fully_shard(part, mesh=mesh)
    return module


@pytest.mark.parametrize("takes", [True, False])
def test_fsdp2_takes_its_buffers_from_the_group_unless_the_program_says_no(group, takes):
    module = sharded(group)
    for part in () if takes else (module[0], module[2]):
        part.set_allocate_memory_from_process_group_for_comm(False)
    for batch in batches(5):
        module(own(batch)).square().mean().backward()
    assert bool(memory_of(group)._taken) == (takes and P > 1)
    if takes:
        assert is_shared(group, memory_of(group).take(60_000, torch.float64)) == (P > 1)


@pytest.mark.mpi(min_size=2)
def test_large_calls_of_ranks_on_a_host_each_take_the_ring(world, monkeypatch):
    """Calls that wait in MPI take the core from the program; small ones are faster there."""
    monkeypatch.setattr(Communicator, "ranks_per_node", property(lambda self: 1))
    group = dist.new_group()
    comm, ways, total = group._get_backend(torch.device("cpu")).comm, [], P * (P + 1) // 2
    for items in (1 << 10, 1 << 17):
        whole = torch.arange(P * items, dtype=torch.float32) % 97
        block = whole.view(P, items)[RANK].clone()
        both, part, every = (RANK + 1) * whole, torch.empty(items), torch.empty_like(whole)
        dist.reduce_scatter_tensor(part, both, group=group)
        dist.all_reduce(both, group=group, async_op=True).wait()
        dist.all_gather_into_tensor(every, block, group=group)
        assert torch.equal(part, total * block)
        assert torch.equal(both, total * whole) and torch.equal(every, whole)
        ways.append(comm.last_plan.algorithm)
    assert ways == ["native", "ring"]
    dist.destroy_process_group(group)
