"""Results of a matrix's cells in a file, and numbers derived from them."""

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

#: The method that sums gradients as they are, and the link that is none.
DENSE, SHARED = "none", "shared memory"
#: Steps over whose losses the mean is taken.
_WINDOW = 10
#: The loss that runs are timed to is the dense run's after this part of its steps, so that one that
#: lags a little behind it can reach it in the rest.
_PART = 0.75
VERSION = 1


class Cell(NamedTuple):
    """Cell of the matrix: a name in each dimension."""

    job: str
    method: str
    algorithm: str
    layout: str
    link: str

    @property
    def key(self) -> str:
        """Its name in the file."""
        return " | ".join(self)


class Result(Struct, frozen=True):
    """Result of a cell; numbers are means over steps and ranks.

    Attributes:
        state: ``done``; ``refused``, as the job cannot be; ``failed``; ``begun``, which it still is
            in the file if the ranks ended in it.
        why: reason, if it was refused or failed.
        attempts: how often it was begun.
        settings: settings of its method, as ``table.key=value``.
        losses: loss of each step, mean over the global batch, before the update.
        seconds: since the beginning, at the end of each step; tests are left out.
        algorithm: all-reduce of the run; codecs have collectives of their own.
        test_loss: on the test samples, after the last step; ``None`` if it is not finite.
        encoded_bytes: bytes of a rank's encoded, or dense, gradients.
        sent_bytes: counted in messages of collectives; activations between stages are not in it.
        shared_bytes: counted in shared memory, in the place of messages.
        dense_bytes: bytes of the best dense all-reduce of the layout.
        comm_share: part of the time in sums of gradients, codes included, and in exchanges.
        wait_share: part of the time in waits for other stages, and for the last rank.
        codec_share: part of the time in codes: encoding, decoding, adding up what was decoded.
    """

    state: str
    why: str = ""
    attempts: int = 1
    settings: list[str] = []
    losses: list[float] = []
    seconds: list[float] = []
    algorithm: str = ""
    test_loss: float | None = None
    encoded_bytes: float = 0.0
    sent_bytes: float = 0.0
    shared_bytes: float = 0.0
    dense_bytes: float = 0.0
    comm_share: float = 0.0
    wait_share: float = 0.0
    codec_share: float = 0.0

    @property
    def smooth(self) -> list[float]:
        """The mean over the last steps, after each step."""
        totals = [0.0, *accumulate(self.losses)]
        return [
            (totals[i] - totals[max(0, i - _WINDOW)]) / min(i, _WINDOW)
            for i in range(1, len(totals))
        ]

    @property
    def seconds_a_step(self) -> float:
        """Mean."""
        return self.seconds[-1] / len(self.seconds) if self.seconds else math.nan

    @property
    def moved_bytes(self) -> float:
        """In messages or in shared memory."""
        return self.sent_bytes + self.shared_bytes

    def loss_at(self, seconds: float) -> float:
        """The smooth loss after so much time; not a number before the first step is done."""
        done = [loss for loss, at in zip(self.smooth, self.seconds) if at <= seconds]
        return done[-1] if done else math.nan

    def seconds_to(self, loss: float) -> float:
        """When the smooth loss comes to ``loss``; infinite if it does not."""
        found = (at for reached, at in zip(self.smooth, self.seconds) if reached <= loss)
        return next(found, math.inf)


class Matrix(Struct):
    """The file.

    Attributes:
        version: version of the format.
        ranks: number of ranks.
        steps: at most, of each cell.
        limit: seconds of training after which a cell is stopped.
        command: command that began it.
        machine: cores, memory and system; never a name.
        software: versions.
        date: when it began, UTC.
        cells: results by :attr:`Cell.key`.
    """

    version: int
    ranks: int
    steps: int
    limit: float
    command: str
    machine: dict[str, str]
    software: dict[str, str]
    date: str
    cells: dict[str, Result] = {}

    def rows(self) -> list[tuple[Cell, Result]]:
        """All that there is, in the order in which it was run."""
        return [(Cell(*key.split(" | ")), result) for key, result in self.cells.items()]

    def done(self, job: str, link: str | None = None) -> list[tuple[Cell, Result]]:
        """Rows with losses of a job, and of a link or all links."""
        return [
            (cell, result)
            for cell, result in self.rows()
            if cell.job == job
            and link in (None, cell.link)
            and result.state == "done"
            and result.losses
        ]

    def target(self, job: str) -> float:
        """The loss that the runs of a job are timed to; not a number without a dense run."""
        dense = [r for cell, r in self.done(job) if cell.method == DENSE]
        if not dense:
            return math.nan
        longest = max(dense, key=lambda result: len(result.losses))
        return longest.smooth[max(1, round(_PART * len(longest.losses))) - 1]


def first(rows: Iterable[tuple[Cell, Result]], target: float) -> tuple[Cell, Result] | None:
    """Row that reaches the loss first, or ``None``."""
    reached = [row for row in rows if math.isfinite(row[1].seconds_to(target))]
    return min(reached, key=lambda row: row[1].seconds_to(target), default=None)


def read_matrix(path: Path) -> Matrix:
    """The file.

    Raises:
        ValueError: it cannot be read, or is of another version.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Matrix)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if found.version != VERSION:
        raise ValueError(f"{path} is of version {found.version}; this program has {VERSION}")
    return found


def write_matrix(path: Path, matrix: Matrix) -> None:
    """Whole, or as it was before."""
    beside = path.with_suffix(".unfinished")
    beside.write_bytes(msgspec.json.format(msgspec.json.encode(matrix), indent=1))
    beside.replace(path)


def in_order(names: Iterable[str]) -> Sequence[str]:
    """Each once, in the order in which they come."""
    return list(dict.fromkeys(names))
