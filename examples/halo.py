"""Heat in a plate on a grid of ranks: a program of plain mpi4py, which imports nothing of ours.

mpirun -n 4 python examples/halo.py
mpirun -n 4 python -m collectives run --gains examples/halo.py          # the same digits
mpirun -n 4 python -m collectives run --profile examples/halo.py
python -m collectives.virtual -n 4 --profile examples/halo.py           # on a modelled network
"""

import numpy as np
from mpi4py import MPI

EDGE, STEPS, BINS = 192, 40, 1 << 18  # cells along a rank's edge; bins of the histogram, 2 MiB


def main() -> None:
    """Steps of Jacobi's; every tenth, all ranks learn the change and the histogram of the plate."""
    world = MPI.COMM_WORLD
    grid = world.Create_cart(MPI.Compute_dims(world.size, 2), periods=[False, True])
    (up, down), (left, right) = grid.Shift(0, 1), grid.Shift(1, 1)
    heat = np.random.default_rng(grid.rank).random((EDGE + 2, EDGE + 2))
    flat = heat.reshape(-1)
    column = MPI.DOUBLE.Create_vector(EDGE + 2, 1, EDGE + 2).Commit()
    change, histogram = np.empty(1), np.empty(BINS, np.int64)
    for step in range(STEPS):
        grid.Sendrecv(heat[1], up, recvbuf=heat[-1], source=down)
        grid.Sendrecv(heat[-2], down, recvbuf=heat[0], source=up)
        first, last = [flat[1:], 1, column], [flat[EDGE:], 1, column]
        grid.Sendrecv(first, left, recvbuf=[flat[EDGE + 1 :], 1, column], source=right)
        grid.Sendrecv(last, right, recvbuf=[flat, 1, column], source=left)
        new = 0.25 * (heat[:-2, 1:-1] + heat[2:, 1:-1] + heat[1:-1, :-2] + heat[1:-1, 2:])
        own = np.abs(new - heat[1:-1, 1:-1]).max()
        heat[1:-1, 1:-1] = new
        if step % 10 == 9:
            grid.Allreduce(np.array([own]), change, MPI.MAX)
            counts = np.histogram(new, BINS, (0.0, 1.0))[0]
            grid.Allreduce(counts, histogram)
            median = np.searchsorted(np.cumsum(histogram), histogram.sum() / 2) / BINS
            if grid.rank == 0:
                print(f"step {step + 1}: change {change[0]:.17g}, median {median:.6f}")
    column.Free()


if __name__ == "__main__":
    main()
