"""A GAN (WGAN-GP): two modules trained in turn, one of them with a penalty on its gradient.

mpirun -n 4 python -m collectives.torch examples/pytorch/gan.py
torchrun --standalone --nproc-per-node 4 examples/pytorch/gan.py --backend gloo

On 1, 2, 3 and 4 ranks, the losses are the same up to rounding.
"""

import argparse
from math import pi

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import LeakyReLU, Linear, Module, Sequential
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

BATCH, NOISE = 48, 4


def net(inputs: int, last: Linear) -> Sequential:
    return Sequential(Linear(inputs, 32), LeakyReLU(), Linear(32, 32), LeakyReLU(), last)


def critic_loss(critic: Module, real: Tensor, fake: Tensor, weight: Tensor) -> Tensor:
    """The fake's mean score above the real's, and 10 times the mean of (|gradient| - 1)^2."""
    between = (weight * real + (1 - weight) * fake).requires_grad_()
    # One pass: a DistributedDataParallel takes one forward pass before each backward pass.
    real_score, fake_score, score = critic(torch.cat([real, fake, between])).chunk(3)
    (gradient,) = torch.autograd.grad(score.sum(), between, create_graph=True)
    penalty = (gradient.norm(dim=1) - 1).square().mean()
    return fake_score.mean() - real_score.mean() + 10 * penalty


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="mpi")
    dist.init_process_group(parser.parse_args().backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)  # all ranks make the same modules
    # A last bias of the critic would cancel out, and Adam would make steps of rounding errors.
    generator, critic = net(NOISE, Linear(32, 2)), net(2, Linear(32, 1, bias=False))
    makes, judges = DistributedDataParallel(generator), DistributedDataParallel(critic)
    average = AveragedModel(generator, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    of_generator = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
    of_critic = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
    drawn = torch.Generator().manual_seed(1)  # all ranks draw a batch, and take their share of it

    def own(batch: Tensor) -> Tensor:
        return batch[rank * BATCH // size : (rank + 1) * BATCH // size]

    for step in range(20):
        for _ in range(3):
            angle = torch.randint(8, (BATCH, 1), generator=drawn) * (pi / 4)
            points = torch.cat([angle.cos(), angle.sin()], 1)
            real = own(points + 0.05 * torch.randn(BATCH, 2, generator=drawn))
            weight = own(torch.rand(BATCH, 1, generator=drawn))
            with torch.no_grad():
                fake = generator(own(torch.randn(BATCH, NOISE, generator=drawn)))
            of_critic.zero_grad()
            judged = critic_loss(judges, real, fake, weight)
            judged.backward()
            of_critic.step()
        of_generator.zero_grad()
        critic.requires_grad_(False)  # the bare module: its gradients are not wanted
        made = -critic(makes(own(torch.randn(BATCH, NOISE, generator=drawn)))).mean()
        made.backward()
        critic.requires_grad_(True)
        of_generator.step()
        average.update_parameters(generator)
        losses = torch.stack([judged.detach(), made.detach()]) / size
        dist.all_reduce(losses)
        if rank == 0 and step % 4 == 3:
            print(f"step {step + 1}: critic {losses[0]:.12f}, generator {losses[1]:.12f}")
    if rank == 0:
        with torch.no_grad():
            points = average(torch.randn(256, NOISE, generator=drawn))
        print(f"mean radius of what the average makes: {points.norm(dim=1).mean():.12f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
