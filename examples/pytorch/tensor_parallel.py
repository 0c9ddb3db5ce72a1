"""Tensor parallelism: each rank keeps columns of one matrix and rows of the next one.

mpirun -n 4 python -m collectives.torch examples/pytorch/tensor_parallel.py
torchrun --standalone --nproc-per-node 4 examples/pytorch/tensor_parallel.py --backend gloo
"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="mpi")
    dist.init_process_group(parser.parse_args().backend)
    torch.set_num_threads(1)
    torch.manual_seed(0)  # all ranks have the same model and the same data
    x = torch.randn(128, 8)
    y = x.sin().sum(1, keepdim=True)
    model = torch.nn.Sequential(torch.nn.Linear(8, 96), torch.nn.Tanh(), torch.nn.Linear(96, 1))

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    for step in range(20):
        loss = torch.nn.functional.mse_loss(model(x), y)  # one all_reduce, behind the second matrix
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4 and dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.6f}")
    if dist.get_rank() == 0:
        weight = model[0].weight
        print(f"rank 0 keeps {tuple(weight.to_local().shape)} of {tuple(weight.shape)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
