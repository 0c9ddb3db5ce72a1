"""Causal attention over the positions of several ranks: shares of the ideal speed, ring and zigzag.

    mpirun -n 8 python -m benchmarks.zigzag

Each rank passes keys and values on as in training, and sleeps instead of attending.  The model of
the same work stands beside it, and what was published for 8 A100 (ring 52.5%, zigzag 89.8%).
"""

import argparse
import sys
from itertools import pairwise
from time import perf_counter, sleep

import numpy as np
from mpi4py import MPI

from collectives import Communicator, abort_on_exception
from collectives.commands.arguments import above_zero, not_negative
from mpitrain.group import TensorGroup
from mpitrain.nn.positions import Positions, Way
from mpitrain.nn.ring_attention import rounds
from mpitrain.pipeline.draw import figure

#: zhuzilin/ring-flash-attention, README: forward and backward on 8 A100, of FlashAttention's speed.
PUBLISHED: dict[Way, float] = {"ring": 0.525, "zigzag": 0.898}
_WAYS: tuple[Way, ...] = ("ring", "zigzag")


def work(positions: Positions, owner: int) -> float:
    """Pairs of a rank's queries and an owner's keys that attend, over those of a whole block."""
    pairs = sum(int((t.keys <= t.queries[:, None]).sum()) for t in positions.tiles(owner, True))
    return pairs / (positions.length / positions.group.size) ** 2


def begins(
    works: list[list[float]], overhead: float = 0.0, message: float = 0.0
) -> list[list[float]]:
    """When each rank begins each step, and ends the last one.

    Args:
        works: ``works[rank][step]``, in whole blocks; keys and values of rank ``rank - step``.
        overhead: of each step, in blocks.
        message: time of keys and values from one rank to the next, in blocks.
    """
    size = len(works)
    found = [[0.0] * size]
    for step in range(size):
        done = [found[-1][r] + works[r][step] + overhead for r in range(size)]
        if step + 1 < size:  # keys and values leave as a step begins
            done = [max(done[r], found[-1][r - 1] + message) for r in range(size)]
        found.append(done)
    return [list(column) for column in zip(*found, strict=True)]


def simulated(works: list[list[float]], overhead: float = 0.0, message: float = 0.0) -> float:
    """Share of the ideal speed; arguments as for ``begins``."""
    ends = [times[-1] for times in begins(works, overhead, message)]
    return sum(map(sum, works)) / len(works) / max(ends)


def measured(comm: Communicator, positions: Positions, works: list[float], block: float) -> float:
    """Share of the ideal speed where ranks sleep ``block`` seconds a block; collective."""
    kv = np.zeros((2, 1, 1, positions.count(comm.rank), 1))
    comm.Barrier()
    start = perf_counter()
    for step, _ in enumerate(rounds(kv, positions)):
        sleep(works[step] * block)
    seconds = comm.allreduce(perf_counter() - start, MPI.MAX)
    return comm.allreduce(sum(works)) * block / comm.size / seconds


def works_of(length: int, size: int, way: Way) -> list[list[float]]:
    """``work`` of each rank in each step."""
    cuts = [Positions(Rank(rank, size), length, way) for rank in range(size)]
    return [[work(cut, (r - step) % size) for step in range(size)] for r, cut in enumerate(cuts)]


def draw(path: str, size: int = 4) -> None:
    """Draws who attends to what, and when, on ``size`` ranks: ring above, zigzag below."""
    drawn = figure(figsize=(9, 5))
    from matplotlib import colormaps

    axes = drawn.subplots(2, 2, width_ratios=(1, 2))
    colours = colormaps["viridis"](np.linspace(0.1, 0.95, size))
    for (square, times), way in zip(axes, _WAYS, strict=True):
        positions = Positions(Rank(0, size), 2 * size, way)
        owner = np.empty(2 * size, int)
        for rank in range(size):
            for piece in positions.pieces(rank):
                owner[piece] = rank
        cells = np.ones((2 * size, 2 * size, 4))
        for row, column in zip(*np.tril_indices(2 * size), strict=True):
            cells[row, column] = colours[(owner[row] - owner[column]) % size]
        square.imshow(cells)
        labels = [f"rank {rank}" for rank in owner]
        square.set(title=f"{way}: queries (rows), keys", xticks=[], yticks=range(2 * size))
        square.set_yticklabels(labels, fontsize=7)
        works = works_of(512 * size, size, way)
        for rank, begun in enumerate(begins(works)):
            for step, length in enumerate(works[rank]):
                label = str(step) if rank == 0 else None
                times.barh(
                    rank, length, left=begun[step], color=colours[step], edgecolor="white",
                    label=label,
                )  # fmt: skip
        share = simulated(works)
        times.set(title=f"{share:.0%} of the ideal speed", xlabel="time, in blocks of scores")
        times.set(xlim=(0, size), yticks=range(size))
        times.set_yticklabels([f"rank {rank}" for rank in range(size)])
        times.invert_yaxis()
        if way == _WAYS[0]:
            times.legend(title="step of the ring", loc="upper right", ncols=size)
    drawn.savefig(path, dpi=110)


class Rank(TensorGroup):
    """A rank of a group, for counting alone."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size


def main() -> int:
    """Prints a row for each way."""
    parser = argparse.ArgumentParser(prog="benchmarks.zigzag", description=__doc__)
    add = parser.add_argument
    add("--milliseconds", type=above_zero, default=50.0, help="time of a block of scores (50)")
    text = "overhead of a step, in blocks, for the model (0.057)"
    add("--overhead", type=not_negative, default=0.057, help=text)
    add("--plot", default="", help="file of a drawing for 4 ranks")
    options = parser.parse_args()
    with Communicator(MPI.COMM_WORLD) as comm, abort_on_exception(comm):
        rows = []
        for way in _WAYS:
            of_eight = works_of(4096, 8, way)
            positions = Positions(TensorGroup(comm), 512 * comm.size, way)
            works = works_of(positions.length, comm.size, way)
            found = max(
                measured(comm, positions, works[comm.rank], options.milliseconds / 1e3)
                for _ in range(3)
            )
            rows.append(
                (simulated(works), found, simulated(of_eight),
                 simulated(of_eight, options.overhead), PUBLISHED[way])
            )  # fmt: skip
        if comm.rank == 0:
            if options.plot:
                draw(options.plot)
            ranks = f"{comm.size} ranks"
            print(f"{'':<18}{ranks:>12}{'asleep':>12}{'8 ranks':>12}{'overhead':>12}{'A100':>12}")
            for way, row in zip(_WAYS, rows, strict=True):
                print(f"{way:<18}" + "".join(f"{share:>12.1%}" for share in row))
            ratios = [b / a for one, two in pairwise(rows) for a, b in zip(one, two, strict=True)]
            print(f"{'zigzag over ring':<18}" + "".join(f"{ratio:>12.3f}" for ratio in ratios))
    return 0


if __name__ == "__main__":
    sys.exit(main())
