"""Methods x algorithms x layouts x links: each trained for some steps, into one file and one page.

The cells are run one after the other, all ranks together.  A job that cannot be is refused, and the
reason stands in its place; training that fails does not end the others.  Cells with a result
are not run again, so that a matrix can be stopped and continued.
"""

import io
import os
import platform
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from math import isfinite
from pathlib import Path

from benchmarks.matrix import cells
from benchmarks.matrix.page import write_page
from benchmarks.matrix.results import VERSION, Cell, Matrix, Result, read_matrix, write_matrix
from collectives import CollectiveError, Communicator, UnknownAlgorithm, provenance
from collectives.bench.report import processor
from collectives.errors import install
from mpitrain.checkpoint.manifest import CheckpointError
from mpitrain.config import Config, ConfigError, load
from mpitrain.data import DataError
from mpitrain.metrics.records import Record, Step
from mpitrain.parallel.compressed_summation import CompressedSummation
from mpitrain.parallel.replicas import ReplicaMismatch
from mpitrain.ranks.stop import StopFlag, Stopped
from mpitrain.ranks.together import all_here, together
from mpitrain.report.facts import duration, number
from mpitrain.run import train
from mpitrain.start import start
from mpitrain.training.evaluation import evaluate
from mpitrain.training.parts import SHARED_ERRORS, Parts
from mpitrain.update.agreement import Diverged

#: Attempts in which the ranks ended, after which a cell is left alone.
_ATTEMPTS = 2
_REFUSED = (ConfigError, UnknownAlgorithm)
_FAILED = (DataError, Diverged, ReplicaMismatch, CheckpointError, CollectiveError)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Extent:
    """Length of a cell's training: a number of steps, or of seconds."""

    steps: int
    seconds: float


def run(
    comm: Communicator,
    folder: Path,
    wanted: Sequence[Cell],
    extent: Extent,
    command: str,
    say: Say = print,
) -> Matrix:
    """Train the cells that have no result in ``folder/matrix.json`` yet, and write
    ``folder/matrix.html``.

    Collective.

    Args:
        comm: the ranks.
        folder: made if it is not there.
        wanted: the cells, the same on all ranks.
        extent: length of each cell.
        command: by which it can be run again; for people.
        say: is called on rank 0 with a line for each cell.

    Returns:
        All that the file has, on all ranks.

    Raises:
        ConfigError: on all ranks: the file cannot be read or written, or is of other ranks, steps
            or seconds.
    """
    first = comm.rank == 0
    together(comm, lambda: _expect_plots() if first else None, ConfigError)
    path = folder / "matrix.json"
    opened = together(
        comm, lambda: _open(comm, path, extent, command) if first else None, ConfigError
    )
    matrix: Matrix = comm.bcast(opened)
    left = [cell for cell in wanted if not _is_over(matrix.cells.get(cell.key))]
    for count, cell in enumerate(left, 1):
        begun = matrix.cells.get(cell.key, Result("begun", attempts=0)).attempts
        if begun >= _ATTEMPTS:
            result = Result("failed", f"the ranks ended in it {begun} times", begun)
        else:
            begin = Result("begun", attempts=begun + 1)
            _note(comm, path, matrix, cell, begin)
            result = _train(comm, cell, extent, folder, begun + 1)
        _note(comm, path, matrix, cell, result)
        if first:
            say(f"[{count}/{len(left)}] {', '.join(cell)}: {told(result)}")
    together(comm, lambda: _draw(matrix, folder) if first else None, ConfigError)
    return matrix


def _expect_plots() -> None:
    if find_spec("matplotlib") is None:
        raise ConfigError(f"the page needs matplotlib: {install('matplotlib', 'plot')}")


def _draw(matrix: Matrix, folder: Path) -> None:
    try:
        write_page(matrix, folder / "matrix.html")
    except OSError as error:
        raise ConfigError(f"--out: {folder}: {error.strerror}") from error


def _is_over(result: Result | None) -> bool:
    return result is not None and result.state != "begun"


def _note(comm: Communicator, path: Path, matrix: Matrix, cell: Cell, result: Result) -> None:
    """Keep a result, in the file too."""
    matrix.cells[cell.key] = result

    def write() -> None:
        if comm.rank == 0:
            try:
                write_matrix(path, matrix)
            except OSError as error:
                raise ConfigError(f"--out: cannot write {path}: {error.strerror}") from error

    together(comm, write, ConfigError)


def _open(comm: Communicator, path: Path, extent: Extent, command: str) -> Matrix:
    """The existing matrix, or an empty one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            found = read_matrix(path)
            its = found.ranks, found.steps, found.limit
            ours = comm.size, extent.steps, extent.seconds
            if its != ours:
                raise ConfigError(
                    f"--out: {path} is of {its[0]} ranks, {its[1]} steps and {its[2]:g} s a cell, "
                    f"not of {ours[0]}, {ours[1]} and {ours[2]:g}; name another folder"
                )
            return found
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"--out: {error}") from error
    software = provenance()
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine = {
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{pages / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
    }
    date, about = software.pop("date"), (command, machine, software)
    return Matrix(VERSION, comm.size, extent.steps, extent.seconds, *about, date)


def _train(comm: Communicator, cell: Cell, extent: Extent, folder: Path, attempt: int) -> Result:
    """One cell.  Its run's folder is removed."""
    own = folder / "cell.unfinished"  # not a name that somebody's runs have, as it is removed
    try:
        job = together(comm, lambda: _job(cell, extent, own), *_REFUSED)
        transport = together(comm, lambda: cells.transport(cell), ValueError)
        with Communicator(comm, transport=transport) as linked:
            linked.count_traffic()
            result = _measured(linked, job, extent, attempt, cells.settings(cell.method))
    except _REFUSED as error:
        return Result("refused", str(error), attempt)
    except (*_FAILED, ValueError) as error:
        return Result("failed", str(error), attempt)
    finally:
        if comm.rank == 0:
            shutil.rmtree(own, ignore_errors=True)
    return result


def _job(cell: Cell, extent: Extent, folder: Path) -> Config:
    """The job of a cell, which is tested at its end alone."""
    own = (
        f"run.dir={str(folder)!r}",
        f"train.steps={extent.steps}",
        f"train.epochs={max(extent.steps, 1)}",
        f"evaluate.every={max(extent.steps, 1)}",
        "optim.warmup_epochs=0",
        "run.log_every=1000000",
    )
    return load(cells.example(cell), [*cells.overrides(cell), *own])


class _Limit(StopFlag):
    """Stops after a number of seconds of steps, by the records that all ranks have."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._left = seconds

    def hear_of(self, step: Step) -> None:
        self._left -= step.seconds
        if self._left <= 0:
            self.reason = "the time of the cell is over"


def _measured(
    comm: Communicator, job: Config, extent: Extent, attempt: int, settings: list[str]
) -> Result:
    """Train, and put together what the records say."""
    steps: list[Step] = []
    limit = _Limit(extent.seconds)

    def tell(record: Record) -> None:
        if isinstance(record, Step):
            steps.append(record)
            limit.hear_of(record)

    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(io.StringIO()))
        loop = start(comm, job, stop=limit)
        shared: tuple[type[Exception], ...] = (*SHARED_ERRORS, CheckpointError)
        try:
            try:
                test = train(loop, on_record=tell, resume_hint="").test_loss
            except Stopped:  # all ranks together, and nothing is under way
                test = evaluate(loop.parts, 0).test_loss
        except shared:
            if all_here(comm):
                loop.close()
            raise
        encoded, working = _of_codes(loop.parts, job)
        dense, algorithm = loop.parts.dense_bytes, loop.parts.store.algorithm
        loop.close()
    total = sum(step.seconds for step in steps)
    means = [comm.allreduce(value) / comm.size for value in (encoded, working)]

    def share(name: str) -> float:
        return sum(step.seconds * getattr(step, name) for step in steps) / total if total else 0.0

    return Result(
        "done",
        attempts=attempt,
        settings=settings,
        losses=[step.loss for step in steps],
        seconds=[round(now, 6) for now in accumulate(step.seconds for step in steps)],
        algorithm=algorithm,
        test_loss=test if isfinite(test) else None,
        encoded_bytes=means[0],
        sent_bytes=sum(step.sent_bytes for step in steps) / len(steps),
        shared_bytes=sum(step.shared_bytes for step in steps) / len(steps),
        dense_bytes=dense,
        comm_share=share("comm_share"),
        wait_share=share("wait_share"),
        codec_share=means[1] / total if total else 0.0,
    )


def _of_codes(parts: Parts, job: Config) -> tuple[float, float]:
    """This rank's encoded bytes of a step, and its seconds in codecs so far."""
    summation = parts.summation
    if isinstance(summation, CompressedSummation) and (sums := summation.sums):
        return sum(one.encoded for one in sums), sum(one.working for one in sums)
    nbytes = float(parts.arena.size * parts.store.pieces[0].parameters.dtype.itemsize)
    return nbytes / (job.sync.period if job.sync.drifts else 1), 0.0


def told(result: Result) -> str:
    """For people."""
    if result.state != "done":
        return f"{result.state}: {result.why}"
    return (
        f"loss {number(result.smooth[-1])} after {len(result.losses)} steps in "
        f"{duration(result.seconds[-1])}"
    )
