"""The model whose training steps ``benchmarks.torch_backend`` measures, and its two wrappers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


def model(width: int) -> nn.Sequential:
    """Six square layers, of 4 MiB each at a width of 1024."""
    torch.manual_seed(0)
    pairs = ((nn.Linear(width, width), nn.ReLU()) for _ in range(6))
    return nn.Sequential(*(layer for pair in pairs for layer in pair), nn.Linear(width, 8))


def ddp(whole: nn.Sequential, group: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(
        whole, process_group=group, gradient_as_bucket_view=True
    )


def fsdp2(whole: nn.Sequential, group: Any) -> nn.Module:
    mesh = DeviceMesh.from_group(group, "cpu")
    for part in (*list(whole)[:-1:2], whole):
        fully_shard(part, mesh=mesh)
    return whole


def step(
    trained: nn.Module, batch: int, width: int, rank: int, losses: list[float]
) -> Callable[[], None]:
    optimizer = torch.optim.SGD(trained.parameters(), 0.01)
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(batch, width, generator=generator)
    targets = torch.randn(batch, 8, generator=generator)

    def step_once() -> None:
        loss = nn.functional.mse_loss(trained(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    return step_once
