"""Sinks: where the numbers of steps and tests go besides ``metrics.jsonl``, by name.

A sink gives a function of a step and its numbers.  It is made of the run's folder, the job's keys
that are not at their defaults, and the number of steps of a run that this one continues.
"""

import csv
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec

from collectives.errors import needed, words
from mpitrain.config import Config, ConfigError, by_key
from mpitrain.files import begin
from mpitrain.metrics.reader import read_records
from mpitrain.metrics.records import Back, Epoch, Record, Skipped, Step, Write
from mpitrain.metrics.writer import ReportError

Job = Mapping[str, Any]
Log = Callable[[int, dict[str, float]], object]


@contextmanager
def _csv(folder: Path, job: Job, done: int) -> Iterator[Log]:
    """``metrics.csv``: a row for each step and each test, with a column for each name."""
    names: dict[str, None] = {}

    def line(values: Iterable[object]) -> bytes:
        into = io.StringIO()
        csv.writer(into, lineterminator="\n").writerow(values)
        return into.getvalue().encode()

    with ExitStack() as opened:
        file: FileIO

        def log(step: int, numbers: dict[str, float]) -> None:
            nonlocal file
            if numbers.keys() <= names.keys():
                file.write(line(map({"step": step, **numbers}.get, names)))
                return
            known = read_records(folder / "metrics.jsonl").records  # this one is the last
            rows = [{"step": step, **found} for step, found in _numbers(known) if found]
            names.update(dict.fromkeys(name for row in rows for name in row))
            lines = [line(names), *(line(map(row.get, names)) for row in rows)]
            file = opened.enter_context(begin(folder / "metrics.csv", lines))

        yield log


@contextmanager
def _tensorboard(folder: Path, job: Job, done: int) -> Iterator[Log]:
    """Event files in ``tensorboard/``; curves of an earlier run after step ``done`` are hidden."""
    from tensorboardX import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1) as writer:
        yield lambda step, numbers: [writer.add_scalar(*one, step) for one in numbers.items()]


@contextmanager
def _wandb(folder: Path, job: Job, done: int) -> Iterator[Log]:
    """W&B, offline unless ``WANDB_MODE`` says otherwise."""
    from wandb import init

    mode: Any = os.environ.get("WANDB_MODE", "offline")
    name, before = os.environ.get("WANDB_NAME", folder.name), _before(folder / "wandb.id", done)
    with init(
        dir=str(folder), config=dict(job), name=name, mode=mode, id=before,
        resume="allow" if before else None,
    ) as run:  # fmt: skip
        (folder / "wandb.id").write_text(run.id)
        run.define_metric("*", step_metric="step")  # a run that goes on may go back some steps
        yield lambda step, numbers: run.log({"step": step, **numbers})


@contextmanager
def _mlflow(folder: Path, job: Job, done: int) -> Iterator[Log]:
    """MLflow, in ``mlflow.db`` unless the program or ``MLFLOW_TRACKING_URI`` names a place."""
    import mlflow

    if not mlflow.is_tracking_uri_set():
        mlflow.set_tracking_uri(f"sqlite:///{folder.resolve()}/mlflow.db")
    before = _before(folder / "mlflow.id", done)
    with mlflow.start_run(run_id=before, run_name=None if before else folder.name) as run:
        (folder / "mlflow.id").write_text(run.info.run_id)
        mlflow.log_params({} if before else dict(job))
        yield lambda step, numbers: mlflow.log_metrics(numbers, step=step, synchronous=False)


def _before(path: Path, done: int) -> str | None:
    """The tracker's name of the run that this one continues, if it does."""
    return path.read_text() if done and path.exists() else None


#: Fields of a step that have several numbers.
_PARTS = ("served", "sync", "noise")
#: The sinks by the names of ``run.records``, and their packages, each with an extra of that name.
SINKS: Mapping[str, Callable[[Path, Job, int], AbstractContextManager[Log]]] = {
    "csv": _csv, "tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow,
}  # fmt: skip
PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}


def expect(names: Iterable[str]) -> None:
    """Raise ConfigError if a package of the sinks of these names is missing."""
    for name in set(names) & set(PACKAGES):
        needed(PACKAGES[name], name, f"run.records = [{name!r}]", ConfigError)


@contextmanager
def sink(
    name: str, config: Config, done: int, keys: Mapping[str, Mapping[str, Any]] | None = None
) -> Iterator[Write]:
    """Open a sink; yields a function that takes records.  ReportError: it fails, now or later."""
    usual = by_key(msgspec.to_builtins(Config()))
    job = by_key(keys or msgspec.to_builtins(config))
    changed = {key: value for key, value in job.items() if value != usual[key]}
    with ExitStack() as stack:
        with _failing(name):
            log = stack.enter_context(SINKS[name](Path(config.run.dir), changed, done))
        last = done

        def write(record: Record) -> None:
            nonlocal last
            ((last, numbers),) = _numbers([record], last)
            if numbers:
                with _failing(name):
                    log(last, numbers)

        yield write


def _numbers(records: Iterable[Record], step: int = 0) -> Iterator[tuple[int, dict[str, float]]]:
    """Step of each record, and numbers of a step or a test by name; ``step``: the last before."""
    for record in records:
        numbers: dict[str, float] = {}
        if isinstance(record, Step | Skipped | Back):
            step = record.step
        if isinstance(record, Step):
            told = msgspec.to_builtins(record)
            parts = [told.pop(key, {}) for key in _PARTS]
            numbers = {name: value for name, value in told.items() if name not in ("event", "step")}
            numbers = numbers | parts[0] | parts[1] | parts[2]
        elif isinstance(record, Epoch):
            tested = {"loss": record.test_loss, **record.metrics}
            numbers = {"epoch": record.epoch, **{f"test_{n}": v for n, v in tested.items()}}
        yield step, numbers


@contextmanager
def _failing(name: str) -> Iterator[None]:
    """Makes any error of a sink one that names it."""
    try:
        yield
    except Exception as error:
        raise ReportError(
            f"run.records: {name} fails: {words(error)}; put that right or leave it out, and train "
            "--resume goes on from the newest checkpoint"
        ) from error
