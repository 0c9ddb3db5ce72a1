"""Groups of torch whose sums are exact: the same bits in any order and any layout of the sum."""

import math
from contextlib import contextmanager

import pytest
from mpi4py import MPI

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from collectives.torch import GroupOptions  # noqa: E402
from collectives.torch.backend import backend_of  # noqa: E402
from collectives.torch.register import register  # noqa: E402

pytestmark = [pytest.mark.mpi, pytest.mark.quick_on(2, 4), pytest.mark.at_most(4)]
P, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
EXACT, PLAIN = GroupOptions(reproducible=True), GroupOptions()


@contextmanager
def world(options=None):
    register()
    dist.init_process_group("collectives", "mpi://", pg_options=options)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def is_exact(group):
    return backend_of(group).comm.is_reproducible


def addend(r, dtype, n=999):
    """Numbers of sizes so different that the order of a sum changes its bits."""
    generator = torch.Generator().manual_seed(r)
    sizes = torch.exp2(torch.randint(-12, 12, (n,), generator=generator).double())
    return (torch.randn(n, generator=generator, dtype=torch.float64) * sizes).to(dtype)


def exact(dtype):
    """The sums of all ranks' addends, each rounded once."""
    every = zip(*(addend(r, dtype).tolist() for r in range(P)), strict=True)
    sums = torch.tensor([math.fsum(values) for values in every], dtype=torch.float64)
    return sums.to(torch.float32).to(dtype) if dtype.itemsize == 2 else sums.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_all_sums_are_exact_and_others_are_not(dtype):
    expected, mine = exact(dtype), addend(RANK, dtype)
    with world(EXACT):
        dist.all_reduce(whole := mine.clone())
        assert torch.equal(whole, expected)
        dist.all_reduce(mean := mine.clone(), dist.ReduceOp.AVG)
        if dtype is torch.float64:  # 16 bits are divided before they are rounded
            assert torch.equal(mean, expected / P)
        dist.reduce(on_last := mine.clone(), P - 1)
        assert RANK < P - 1 or torch.equal(on_last, expected)
        length = len(mine) // P
        dist.reduce_scatter_tensor(block := mine[:length].clone(), mine[: P * length])
        assert torch.equal(block, expected[RANK * length : (RANK + 1) * length])
        sizes = [len(mine) - 10 * (P - 1), *[10] * (P - 1)]
        parts = list(mine.split(sizes))
        dist.reduce_scatter(block := torch.empty_like(parts[RANK]), parts)
        assert torch.equal(block, expected.split(sizes)[RANK])
        work = dist.all_reduce(whole := mine.clone(), async_op=True)
        work.wait()
        assert torch.equal(whole, expected)
        dist.all_reduce(whole := mine.clone(), group=dist.new_group(pg_options=PLAIN))
        if dtype is torch.float64:
            assert torch.equal(whole, expected) == (P < 3)


def test_groups_follow_their_options_then_the_world_then_the_environment(monkeypatch):
    with world() as group:
        assert not is_exact(group)
        assert is_exact(dist.new_group(pg_options=EXACT))
        assert not is_exact(dist.new_group())
    with world(EXACT) as group:
        assert is_exact(group) and is_exact(dist.new_group())
        assert is_exact(dist.init_device_mesh("cpu", (P,)).get_group())
        assert not is_exact(dist.new_group(pg_options=PLAIN))
    monkeypatch.setenv("COLLECTIVES_TORCH_REPRODUCIBLE", "1")
    with world() as group:
        assert is_exact(group) and is_exact(dist.new_group())
    with world(PLAIN) as group:
        assert not is_exact(group) and not is_exact(dist.new_group())


def test_what_cannot_be_exact_is_refused():
    with world(EXACT):
        with pytest.raises(Exception, match="reproducible"):
            dist.all_reduce(torch.ones(3), dist.ReduceOp.PRODUCT)
        with pytest.raises(ValueError, match="rank by rank"):
            dist.all_reduce(torch.eye(2).to_sparse())
        with pytest.raises(TypeError, match="GroupOptions"):
            dist.new_group(pg_options={"reproducible": True})
        if P > 1:
            with pytest.raises(ValueError, match=r"ranks \[0\] of the group"):
                dist.new_group(pg_options=EXACT if RANK == 0 else PLAIN)


def module(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(20, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)
    ).to(dtype)


def losses(net, optimizer, inputs, labels, factor=1):
    """The bits of this rank's losses; gradients are multiplied by ``factor``."""
    found = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(net(inputs), labels, reduction="sum")
        loss.backward()
        for parameter in net.parameters():
            parameter.grad *= factor
        optimizer.step()
        found.append(loss.item().hex())
    return found


def data(samples, r=0):
    generator = torch.Generator().manual_seed(100 + r)
    return (torch.randn(samples, size, generator=generator) for size in (20, 10))


def test_replicas_of_any_buckets_and_shards_have_the_same_losses():
    """Each way sums in blocks of its own, so that plain sums of three ranks or more differ."""

    def replicas(made, **how):
        return DistributedDataParallel(made, **how), torch.optim.Adam(made.parameters(), 0.01)

    def shards(made, **_):
        fully_shard(made[0])
        return fully_shard(made), torch.optim.Adam(made.parameters(), 0.01)

    def zero(made, **_):
        optimizer = ZeroRedundancyOptimizer(made.parameters(), torch.optim.Adam, lr=0.01)
        return DistributedDataParallel(made), optimizer

    with world(EXACT):
        ways = [replicas(module()), replicas(module(), bucket_cap_mb=0.001), zero(module())]
        if P in (1, 2, 4):  # FSDP divides the sum, and DDP what it adds
            ways.append(shards(module()))
        found = [losses(*way, *data(8, RANK)) for way in ways]
    assert all(other == found[0] for other in found[1:])
