"""The search's model of a step beside vTrain's measured layouts of GPTs on A100 GPUs.

python -m benchmarks.vtrain ground_truth_single.csv ground_truth_multi.csv

The files are those of github.com/VIA-Research/vTrain (MICRO 2024), in ``data/``. Each second row
fits what a GPU computes in a second and the two links' bandwidths; the others are predicted.
"""

import argparse
import csv
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from collectives.analysis.topology import LinkCost
from mpitrain.search.candidates import Candidate
from mpitrain.search.layers import LayerCost
from mpitrain.search.machine import Machine
from mpitrain.search.stages import Numerics, StageCosts
from mpitrain.search.sums import LayerSums

#: Vocabulary of Megatron's GPTs; ranks of a node; fp16 numbers.
_VOCABULARY, _PER_NODE, _NUMERICS = 51200, 8, Numerics(2, 2, 8)
#: A GPU's operations, bytes of memory, seconds of a small layer; bytes of the two links.
_UNITS = ("FLOP/s", "B/s of memory", "s a layer", "B/s inside", "B/s between nodes")


class Row(NamedTuple):
    """A measured layout: its shapes, and the seconds of a step."""

    ranks: int
    batch: int
    micro_batch: int
    width: int
    heads: int
    layers: int
    positions: int
    layout: tuple[int, int, int]
    seconds: float


def read(path: Path) -> list[Row]:
    """The layouts of a file of vTrain's."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        return [_row(row) for row in csv.DictReader(file)]


def _row(row: dict[str, str]) -> Row:
    tensor, data, pipe = (
        int(row[f"{axis} parallelism"]) for axis in ("tensor", "data", "pipeline")
    )
    return Row(
        int(row["# GPUs"]),
        int(row["global batch"]),
        int(row["micro batch"]),
        int(row["hidden size"]),
        int(row["attention heads"]),
        int(row["# layers"]),
        int(row["sequence length"]),
        (pipe, data, tensor),
        float(row["iteration time (ms)"]) / 1e3,
    )


def predicted(row: Row, parameters: npt.NDArray[np.float64]) -> float:
    """Seconds of a step; ``parameters``: those of :data:`_UNITS`."""
    rate, stream, launch, inside, network = parameters
    pipe, data, tensor = row.layout
    width, positions = row.width, row.positions
    work = 24.0 * positions * width**2 + 4.0 * positions**2 * width
    outputs, size = float(positions * width), 12.0 * width**2
    scores = 2.5 * row.heads * positions**2
    block = LayerCost(
        "block", work, 2 * work, 5 * outputs, 12 * outputs + scores, outputs, size, (outputs,) * 4
    )  # Korthikanti et al. 2022
    head = 2.0 * positions * width * _VOCABULARY
    table = _VOCABULARY * width
    layers = [
        LayerCost("embedding", 0.0, 0.0, outputs, 0.0, outputs, table, (outputs,)),
        *[block] * row.layers,
        LayerCost(
            "head", head, 2 * head, outputs, positions * _VOCABULARY, outputs, 0.0, (outputs,)
        ),
    ]
    parts = row.batch // data // row.micro_batch
    links = LinkCost(5e-6, 1 / inside), LinkCost(1e-5, 1 / network)
    machine = Machine(row.ranks, _PER_NODE, rate, stream, launch, np.inf, *links, adapters=4)
    layout = Candidate(pipe, data, tensor, micro_batches=parts)
    costs = StageCosts(LayerSums.over(layers), machine, layout, row.micro_batch, _NUMERICS)
    # Megatron puts equally many blocks on each stage.
    each = row.layers // pipe
    ends = [0, *(1 + each * stage for stage in range(1, pipe)), len(layers)]
    times = [costs.seconds(costs.sums.at(span)) for span in pairwise(ends)]
    return float(sum(times) + (parts - 1) * max(times))


def errors(rows: Sequence[Row], parameters: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Relative errors of the predictions."""
    return np.array([predicted(row, parameters) / row.seconds - 1 for row in rows])


def fit(rows: Sequence[Row]) -> npt.NDArray[np.float64]:
    """The parameters of least mean error, found one after the other by smaller steps."""
    best = np.array([1.5e14, 1.5e12, 1e-4, 2e11, 2e10])
    least = float(np.abs(errors(rows, best)).mean())
    for step in (2.0, 1.4, 1.15, 1.05):
        better = True
        while better:
            better = False
            for axis in range(len(best)):
                for factor in (step, 1 / step):
                    tried = best.copy()
                    tried[axis] *= factor
                    mean = float(np.abs(errors(rows, tried)).mean())
                    if mean < least:
                        best, least, better = tried, mean, True
    return best


def main() -> None:
    """Print the errors of each file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    for path in parser.parse_args().files:
        rows = read(path)
        parameters = fit(rows[::2])
        off = np.abs(errors(rows[1::2], parameters))
        found = ", ".join(
            f"{value:.3g} {unit}" for value, unit in zip(parameters, _UNITS, strict=True)
        )
        print(f"{path.name}: {len(rows[::2])} rows fit {found}")
        print(
            f"  error of the other {len(off)}: mean {off.mean():.1%}, median {np.median(off):.1%}"
        )


if __name__ == "__main__":
    main()
