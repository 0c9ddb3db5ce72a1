"""Alpha, beta and gamma of a machine, from a benchmark's file, and how well they explain it.

Each measured time of an algorithm of ours is alpha times its messages in a row, plus beta times the
bytes that its busiest rank sends, plus gamma times the bytes that it reduces, as counted in its
schedule.  Relative errors are minimised, as times range over six orders of magnitude.
"""

import re
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from collectives.algorithms import build, names, parse
from collectives.analysis import records
from collectives.compile.cost import Cost, Model, count, expect_countable
from collectives.contracts import CONTRACTS
from collectives.errors import CollectiveError

#: Kinds of memory that the model is for.
MEMORIES = ("numpy", "shared")
#: Our rows that the model is not for.
LEFT_OUT = "in overlapping segments or of unknown algorithms"
#: Two size classes are taken if they divide the median error by this.
_CLEARLY = 2.0
#: One size class is enough where it explains the times within this relative error.
_GOOD = 0.05


class Sample(NamedTuple):
    """One measured time, and the schedule's counts: messages, bytes sent, bytes reduced."""

    algorithm: str
    nbytes: int
    seconds: float
    counted: tuple[float, float, float]

    def predicted(self, model: Model) -> float:
        return float(np.dot(self.counted, model))


@dataclass(frozen=True)
class Fit:
    """The parameters for buffers of ``least`` to ``most`` bytes, and their relative errors."""

    least: int
    most: int
    model: Model
    errors: npt.NDArray[np.float64]

    @property
    def median_error(self) -> float:
        return float(np.median(self.errors))


def read(paths: list[Path], memory: str = "numpy") -> tuple[list[Sample], int]:
    """The times of our algorithms in files of ``bench -J``, and how many rows are
    :data:`LEFT_OUT`.

    Raises:
        CollectiveError: a file is no such file, or there are fewer than three times.
        TooLarge: a measured schedule has too many ranks to count.
    """
    samples = []
    left_out = 0
    others: set[str] = set()
    costs: dict[tuple[str, str, int], Cost] = {}
    for path in paths:
        for r in records.read(path).results:
            collective = r.collective.removesuffix("v")
            # Segments that follow one another repeat all rounds, each with its part of the bytes.
            match = re.search(r" in (\d+) segments$", r.ran)
            ran, segments = (r.ran[: match.start()], int(match[1])) if match else (r.ran, 1)
            if collective not in CONTRACTS or ran in ("", "native", "nccl"):
                continue
            if r.memory != memory:
                others.add(r.memory)
                continue
            if " in " in ran or parse(ran)[0] not in names(collective):
                left_out += 1
                continue
            if (key := (collective, ran, r.ranks)) not in costs:
                schedule = build(*key)
                expect_countable(schedule)
                costs[key] = count(schedule)
            cost = costs[key]
            messages = cost.latency * segments
            counted = (messages, cost.sent * r.bytes, cost.reduced * r.bytes)
            samples.append(Sample(r.algorithm, r.bytes, 1e-6 * r.p50_us, counted))
    if len(samples) < 3:
        raise CollectiveError(
            f"{len(samples)} times of our algorithms on {memory} memory; three parameters need more"
            + f"; left out: {left_out} rows {LEFT_OUT}" * bool(left_out)
            + "".join(f"; --memory {other} reads the others" for other in others & {*MEMORIES})
        )
    return samples, left_out


def fit(samples: list[Sample]) -> list[Fit]:
    """Fits one set of parameters, or two, below and above a size, where that is much better.

    Caches, and the protocols of MPI libraries, make small messages another machine than large ones.
    """
    whole = _fit(samples)
    sizes = sorted({s.nbytes for s in samples})
    best = [whole]
    for cut in sizes[2:-2]:
        parts = [s for s in samples if s.nbytes < cut], [s for s in samples if s.nbytes >= cut]
        split = [_fit(part) for part in parts]
        if _error(split) < _error(best):
            best = split
    worth = whole.median_error > _GOOD and _error(best) * _CLEARLY < whole.median_error
    return best if worth else [whole]


def _error(fits: list[Fit]) -> float:
    return float(np.median(np.concatenate([f.errors for f in fits])))


def _fit(samples: list[Sample]) -> Fit:
    """Non-negative least squares of the relative errors, over all subsets of three parameters."""
    counted = np.array([s.counted for s in samples])
    seconds = np.array([s.seconds for s in samples])
    scaled = counted / seconds[:, None]
    best, least = np.zeros(3), np.inf
    for used in (c for n in (1, 2, 3) for c in combinations(range(3), n)):
        columns = list(used)
        found, *_ = np.linalg.lstsq(scaled[:, columns], np.ones(len(seconds)), rcond=None)
        parameters = np.zeros(3)
        parameters[columns] = found
        residual = float(np.sum((scaled @ parameters - 1) ** 2))
        # A ring alone sends and reduces in proportion: sending counts then, as it comes first.
        if found.min() >= 0 and residual < least - 1e-9 * len(seconds):
            best, least = parameters, residual
    model = Model(*best.tolist())
    errors = np.array([abs(s.predicted(model) / s.seconds - 1) for s in samples])
    sizes = [s.nbytes for s in samples]
    return Fit(min(sizes), max(sizes), model, errors)
