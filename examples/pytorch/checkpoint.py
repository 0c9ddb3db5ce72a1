"""A distributed checkpoint (DCP) of an FSDP2 model that other numbers of ranks can load.

mpirun -n 4 python -m collectives.torch examples/pytorch/checkpoint.py save saved
mpirun -n 2 python -m collectives.torch examples/pytorch/checkpoint.py load saved
torchrun --standalone --nproc-per-node 2 examples/pytorch/checkpoint.py load saved --backend gloo

Both print the loss after step 6, and it is the same one.
"""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=["save", "load"])
    parser.add_argument("folder", help="a folder that all ranks can write to")
    parser.add_argument("--backend", default="mpi")
    given = parser.parse_args()
    dist.init_process_group(given.backend)
    torch.set_num_threads(1)
    torch.manual_seed(0)  # all ranks have the same data, so that any number of them may go on
    x = torch.randn(128, 8)
    y = x.sin().sum(1, keepdim=True)
    torch.manual_seed(1 if given.part == "save" else 2)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()

    if given.part == "save":
        train(3)
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=given.folder)
    else:
        weights, moments = get_state_dict(model, optimizer)  # where the saved ones will be read to
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=given.folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    train(3)
    loss = torch.nn.functional.mse_loss(model(x), y)
    if dist.get_rank() == 0:
        print(f"step 6: loss {loss.item():.6f} on {dist.get_world_size()} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
