"""FSDP2: each rank keeps a part of the parameters, of their gradients and of the optimiser's state.

mpirun -n 4 python -m collectives.torch examples/pytorch/fsdp2.py
torchrun --standalone --nproc-per-node 4 examples/pytorch/fsdp2.py --backend gloo
"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import Sequential, TransformerEncoderLayer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="mpi")
    dist.init_process_group(parser.parse_args().backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # all ranks make the same model
    layer = {"dim_feedforward": 64, "dropout": 0.0, "batch_first": True}
    model = Sequential(*(TransformerEncoderLayer(32, 4, **layer) for _ in range(2)))

    for part in model:
        fully_shard(part)  # its parameters are gathered before its forward(), and freed behind it
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(5):
        drawn = torch.Generator().manual_seed(step * size + rank)  # each rank its own samples
        x = torch.randn(4, 16, 32, generator=drawn)
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()  # each rank gets its part of the mean gradients
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / size
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step}: loss {mean.item():.6f}")
    if rank == 0:
        kept = sum(p.to_local().numel() for p in model.parameters())
        print(f"rank 0 keeps {kept} of {sum(p.numel() for p in model.parameters())} parameters")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
