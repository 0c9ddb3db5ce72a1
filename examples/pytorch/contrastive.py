"""A contrastive loss (SimCLR): each sample is compared with those of the whole batch, on all ranks.

mpirun -n 4 python -m collectives.torch examples/pytorch/contrastive.py
torchrun --standalone --nproc-per-node 4 examples/pytorch/contrastive.py --backend gloo

On 1, 2, 3 and 4 ranks, the losses are the same up to rounding.
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_single  # from torch 2.13 on
from torch.nn import Linear, ReLU, Sequential
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel

BATCH, FEATURES, TEMPERATURE = 48, 16, 0.5


def loss_of(first: Tensor, second: Tensor) -> Tensor:
    """NT-Xent of two views of each sample (Chen et al. 2020)."""
    count = len(first)
    views = normalize(torch.cat([first, second]), dim=1)
    scores = (views @ views.T / TEMPERATURE).fill_diagonal_(float("-inf"))
    return cross_entropy(scores, torch.arange(2 * count).roll(count))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="mpi")
    dist.init_process_group(parser.parse_args().backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)  # all ranks make the same module
    module = Sequential(Linear(FEATURES, 32), ReLU(), Linear(32, 8))
    net = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    drawn = torch.Generator().manual_seed(1)  # all ranks draw a batch, and take their share of it
    for step in range(20):
        samples = torch.randn(BATCH, FEATURES, generator=drawn)
        views = samples + 0.3 * torch.randn(2, BATCH, FEATURES, generator=drawn)
        own = views.tensor_split(size, dim=1)[rank]
        # One pass: a DistributedDataParallel takes one forward pass before each backward pass.
        first, second = net(own.flatten(0, 1)).chunk(2)
        # Every rank has the loss of the whole batch, and all_gather_single's gradient is the sum of
        # all ranks', so that the mean of DistributedDataParallel is one process's gradient.
        loss = loss_of(*(all_gather_single(view, 0, dist.group.WORLD) for view in (first, second)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 4 == 3:
            print(f"step {step + 1}: loss {loss.item():.12f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
