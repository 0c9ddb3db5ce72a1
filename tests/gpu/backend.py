"""Stage 11: torch.distributed on tensors of a GPU, beside the same calls on the CPU's."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.gpu.check import Check

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)
LARGE = (256 << 10) + 3


@cache
def group():
    """The group of all ranks, as a program makes it."""
    from collectives.torch.register import register

    register()
    dist.init_process_group("collectives", "mpi://")
    return dist.group.WORLD


@contextmanager
def gpu() -> Iterator[str]:
    """The type of the GPU; in a dry run, that of the host, whose tensors then count as a GPU's."""
    if torch.cuda.is_available():
        yield "cuda"
        return
    from pytest import MonkeyPatch  # a GPU's machine may have none

    from tests.gpu.elsewhere import Elsewhere

    with MonkeyPatch.context() as patch:
        Elsewhere(patch)
        yield "cpu"


def of_rank(rank, count, dtype, device):
    return (torch.arange(count, device=device) % 5 + rank).to(dtype)


def reduced(count, dtype, device):
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor, part = of_rank(rank, count, dtype, device), of_rank(0, count, dtype, device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX if dtype is torch.bool else dist.ReduceOp.SUM)
    if dtype is torch.bool:
        return [tensor]
    rooted = of_rank(rank, count, dtype, device)
    dist.reduce(rooted, size - 1)
    dist.reduce_scatter_tensor(part, of_rank(rank, count * size, dtype, device))
    whole = torch.empty(count, 2, dtype=dtype, device=device)
    strided = whole[:, 0].copy_(of_rank(rank, count, dtype, device))
    dist.all_reduce(strided)
    return [tensor, part, strided, rooted if rank == size - 1 else part]


def moved(count, dtype, device):
    rank, size = dist.get_rank(), dist.get_world_size()
    own = of_rank(rank, count, dtype, device)

    def room(times=1):
        return torch.zeros(count * times, dtype=dtype, device=device)

    gathered, exchanged, sent, scattered = room(size), room(size), own.clone(), room()
    every = [room() for _ in range(size)]
    dist.all_gather_into_tensor(gathered, own)
    dist.all_gather(every, own)
    dist.all_to_all_single(exchanged, of_rank(rank, count * size, dtype, device))
    dist.broadcast(sent, size - 1)
    parts = [of_rank(r, count, dtype, device) for r in range(size)]
    dist.scatter(scattered, parts if rank == 0 else None, 0)
    rows = [r + rank for r in range(size)]
    unequal = torch.zeros(sum(rows), 2, dtype=dtype, device=device)
    source = of_rank(rank, 2 * sum(rows), dtype, device).view(-1, 2)
    dist.all_to_all_single(unequal, source, rows, rows)
    return [gathered, *every, exchanged, sent, scattered, unequal]


def between_two(count, dtype, device):
    rank, size = dist.get_rank(), dist.get_world_size()
    got, own = torch.zeros(count, dtype=dtype, device=device), of_rank(rank, count, dtype, device)
    messages = [
        dist.P2POp(dist.isend, own, (rank + 1) % size),
        dist.P2POp(dist.irecv, got, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return [got]


def in_background(count, dtype, device):
    """Sums under way at once, one of which a callback follows."""
    tensors = [of_rank(dist.get_rank() + n, count, dtype, device) for n in range(4)]
    works = [dist.all_reduce(t, dist.ReduceOp.MAX, async_op=True) for t in tensors]
    twice = works[0].get_future().then(lambda future: future.value()[0] == tensors[0])
    for work in works:
        work.wait()
    return [*tensors, twice.wait()]


def operations():
    """Each operation on the GPU and on the CPU."""
    group()
    seen = 0
    for call in (reduced, moved, between_two, in_background):
        for dtype in TYPES:
            for count in (0, 7, LARGE):
                if call is between_two and dist.get_world_size() == 1:
                    continue
                wanted = call(count, dtype, "cpu")
                with gpu() as device:
                    found = call(count, dtype, device)
                for one, other in zip(found, wanted, strict=True):
                    assert one.device.type == device, f"{call.__name__} moved a tensor"
                    assert torch.equal(one.cpu(), other), f"{call.__name__}, {dtype}, {count}"
                    seen += 1
    return f"{seen} tensors are the CPU's, bit by bit"


def streams():
    """A sum of what a long kernel of another stream brings, whose memory is freed at once."""
    group()
    if not torch.cuda.is_available():
        return "not on the stand-in, which has one stream"
    big = torch.rand(4096, 4096, device="cuda")
    wrong = 0
    for turn in range(8):
        with torch.cuda.stream(torch.cuda.Stream()):
            product = big
            for _ in range(6):
                product = product @ big / 4096
            tensor = product.mul_(0).add_(turn + dist.get_rank())
            work = dist.all_reduce(tensor, async_op=True)
            del product
            junk = [torch.full_like(big, -1.0) for _ in range(3)]
            work.wait()
            size = dist.get_world_size()
            wrong += int((tensor != turn * size + size * (size - 1) / 2).sum())
            del junk
    assert not wrong, f"{wrong} numbers are wrong"
    return "8 turns"


def trained(device, wrap, steps=6):
    torch.manual_seed(3)
    layers = torch.nn.Linear(24, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)
    module = wrap(torch.nn.Sequential(*layers).to(device))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    draw = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 24, generator=draw).to(device)
        optimizer.zero_grad()
        loss = (module(x) - x[:, :8].sin()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def wrapped(wrap):
    def check():
        group()
        wanted = trained("cpu", wrap("cpu"))
        with gpu() as device:
            found = trained(device, wrap(device))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
        return f"6 steps; loss {found[-1]:.6f}, the CPU's {wanted[-1]:.6f}"

    return check


def sharded(device):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    return lambda module: fully_shard(module, mesh=mesh) and module


CHECKS = [
    Check(11, "backend.operations", operations, (1, 2, 4), 120.0),
    Check(11, "backend.streams", streams, (2,), 60.0),
    Check(11, "backend.ddp", wrapped(lambda _: DistributedDataParallel), (2, 4), 60.0),
    Check(11, "backend.fsdp2", wrapped(sharded), (2,), 60.0),
]
