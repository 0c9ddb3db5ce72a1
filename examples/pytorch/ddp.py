"""DistributedDataParallel: each rank trains on its share of the data, and all models stay alike.

mpirun -n 4 python -m collectives.torch examples/pytorch/ddp.py
torchrun --standalone --nproc-per-node 4 examples/pytorch/ddp.py --backend gloo
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="mpi")
    dist.init_process_group(parser.parse_args().backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # all ranks have the same data and, at first, the same model
    x = torch.randn(512, 8)
    data = TensorDataset(x, x.sin().sum(1, keepdim=True))
    module = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = DistributedSampler(data, size, rank)  # a rank's share of each epoch
    for epoch in range(5):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for inputs, targets in DataLoader(data, 64 // size, sampler=sampler):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()  # gradients are now means over all ranks
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / size / 8:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
