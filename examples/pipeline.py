"""A pipeline from Python: the job of pipeline.toml, cut into a stage for each rank.

mpirun -n 2 python examples/pipeline.py
"""

from pathlib import Path

from mpi4py import MPI

from collectives import Communicator
from mpitrain import Trainer, load, train


def main() -> None:
    """Trains the job; rank 0 reports."""
    with Communicator(MPI.COMM_WORLD) as comm:
        job = Path(__file__).with_name("pipeline.toml")
        config = load(job, [f"parallel.pipe={comm.size}"])
        with Trainer(comm, config) as trainer:
            stages = comm.gather(trainer.layers)
            for rank, layers in enumerate(stages or ()):  # on rank 0
                print(f"rank {rank} has {', '.join(layers)}")
            train(trainer)


if __name__ == "__main__":
    main()
