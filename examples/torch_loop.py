"""A training loop of one's own in torch: DataParallel averages the gradients in ``backward()``.

mpirun -n 4 python examples/torch_loop.py
"""

import torch
from mpi4py import MPI

from collectives import Communicator
from mpitrain.adapters.torch import DataParallel

STEPS, BATCH = 40, 96


def main() -> None:
    """Fits a small network to a circle; all ranks end with the same parameters."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    points = 2 * torch.rand(STEPS * BATCH, 2) - 1
    inside = (points.norm(dim=1) < 0.7).float().unsqueeze(1)
    module = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    criterion = torch.nn.BCEWithLogitsLoss()
    with Communicator(MPI.COMM_WORLD) as comm, DataParallel(comm, module) as replica:
        optimizer = torch.optim.Adam(replica.parameters(), lr=0.02)
        for step in range(STEPS):
            batch = slice(step * BATCH + comm.rank, (step + 1) * BATCH, comm.size)  # this rank's
            optimizer.zero_grad()
            loss = criterion(replica(points[batch]), inside[batch])
            loss.backward()  # gradients are now means over all ranks
            optimizer.step()
            if step % 10 == 9:
                mean = comm.allreduce(loss.item()) / comm.size
                if comm.rank == 0:
                    print(f"step {step + 1}: loss {mean:.3f}")
        norms = comm.allgather(sum(p.norm().item() for p in module.parameters()))
        assert len(set(norms)) == 1, "replicas are equal bit by bit"
        if comm.rank == 0:
            torch.save(module.state_dict(), "circle.pt")
            print("wrote circle.pt")


if __name__ == "__main__":
    main()
