"""What a run reports: records, as lines of JSON in a file and as lines on the console.

The file is the source of truth; everything on the console is in it too.  Each line is an object
whose ``event`` says which record it is.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from mpitrain.config import Config


class Start(Struct, frozen=True, tag="start", tag_field="event"):
    """What is about to run.

    Attributes:
        ranks: processes.
        processes: ``host:number`` of each, as launchers name those that die.
        layout: how they are arranged.
        stages: the layers of each stage of the pipeline, chunk after chunk.
        algorithm: of the all-reduce of gradients.
        reason: why it was chosen.
        parameters: numbers that are trained.
        config: the whole job, defaults included.
    """

    ranks: int
    processes: list[str]
    layout: str
    stages: list[list[str]]
    algorithm: str
    reason: str
    parameters: int
    config: Config


class Step(Struct, frozen=True, tag="step", tag_field="event"):
    """One step of all ranks.

    Attributes:
        step: counted from 1 through the whole run.
        epoch: counted from 0.
        samples: in the global batch.
        loss: mean over the global batch, before the update.
        grad_norm: Euclidean norm of the global gradient.
        lr: learning rate.
        seconds: wall-clock time since the step before, mean over the ranks.
        samples_per_s: of all ranks together.
        comm_share: part of ``seconds`` spent in reducing gradients, waits for slower ranks
            included, 0 to 1.
    """

    step: int
    epoch: int
    samples: int
    loss: float
    grad_norm: float
    lr: float
    seconds: float
    samples_per_s: float
    comm_share: float


class Skipped(Struct, frozen=True, tag="skipped", tag_field="event"):
    """A step whose loss or gradient was not finite, and which changed nothing.

    Attributes:
        step: counted from 1.
        culprits: ranks and parameters.
        loss_scale: from now on.
    """

    step: int
    culprits: str
    loss_scale: float


class Straggler(Struct, frozen=True, tag="straggler", tag_field="event"):
    """A rank that kept its peers waiting since the last look, ``run.log_every`` steps ago.

    Attributes:
        step: that was done last.
        rank: who.
        host: where.
        factor: its time outside of communication over the median of its peers', which have the
            same stage of the pipeline.
    """

    step: int
    rank: int
    host: str
    factor: float


class Saved(Struct, frozen=True, tag="saved", tag_field="event"):
    """A checkpoint was written.

    Attributes:
        step: after which it continues.
        path: folder.
        seconds: from the decision to the last byte on disk.
    """

    step: int
    path: str
    seconds: float


class Resumed(Struct, frozen=True, tag="resumed", tag_field="event"):
    """Training goes on from a checkpoint.

    Attributes:
        step: that was done last.
        path: folder.
        refused: newer checkpoints that could not be used, and why.
    """

    step: int
    path: str
    refused: list[str]


class Epoch(Struct, frozen=True, tag="epoch", tag_field="event"):
    """After a pass over the training samples: how the test samples fare.

    Attributes:
        epoch: counted from 0.
        test_accuracy: part of their labels that is right.
        test_loss: mean over their labels.
    """

    epoch: int
    test_accuracy: float
    test_loss: float


class Summary(Struct, frozen=True, tag="summary", tag_field="event"):
    """The end of a run; rates and shares are over all its steps."""

    test_accuracy: float
    test_loss: float
    ranks: int
    algorithm: str
    reason: str
    samples_per_s: float
    comm_share: float

    def __str__(self) -> str:
        return (
            f"test accuracy {self.test_accuracy:.2%}, {_ranks(self.ranks)}, "
            f"gradients by {self.algorithm} ({self.reason}), {self.samples_per_s:.0f} samples/s, "
            f"communication {self.comm_share:.1%} of step time"
        )


Record = Start | Step | Skipped | Straggler | Epoch | Saved | Resumed | Summary
Write = Callable[[Record], None]


@contextmanager
def recorder(config: Config, steps: int, done: int = 0) -> Iterator[Write]:
    """Open the reports of a run of ``steps`` steps: a function to call with each record.

    Args:
        config: the job.
        steps: of the whole run.
        done: steps of an earlier run that this one continues; what it reported up to there stays.

    Raises:
        OSError: ``config.run.dir`` cannot be made or written.
    """
    folder = Path(config.run.dir)
    with ExitStack() as stack:
        sinks = [stack.enter_context(json_lines(folder / "metrics.jsonl", done))]
        sinks.append(stack.enter_context(console(steps, config.run.log_every)))
        if config.run.tensorboard:
            from mpitrain.tensorboard import curves

            sinks.append(stack.enter_context(curves(folder / "tensorboard", done)))

        def write(record: Record) -> None:
            for sink in sinks:
                sink(record)

        yield write


@contextmanager
def json_lines(path: Path, done: int = 0) -> Iterator[Write]:
    """A file at ``path`` with a line a record, complete up to the last record at any time.

    What is there already is replaced, but for the records up to step ``done``.
    """
    # What is new is the user's own; one that is there already keeps its permissions.
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = list(_until(path, done)) if done and path.exists() else []
    beside = path.with_suffix(".unfinished")
    beside.write_bytes(b"".join(kept))
    beside.rename(path)
    with path.open("ab") as file:

        def write(record: Record) -> None:
            file.write(msgspec.json.encode(record) + b"\n")
            file.flush()

        yield write


def _until(path: Path, done: int) -> Iterator[bytes]:
    """The lines of a file before the first of a later step, or one that was cut off."""
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            step = msgspec.json.decode(line).get("step", 0)
        except (msgspec.DecodeError, AttributeError):
            return
        if step > done:
            return
        yield line


@contextmanager
def console(steps: int, log_every: int) -> Iterator[Write]:
    """Lines for people, every ``log_every`` steps, and a progress bar if there is a terminal."""
    terminal = Console(highlight=False, markup=False, soft_wrap=True)
    with Progress(
        BarColumn(None),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=terminal,
        disable=not _is_watched(terminal),
        transient=True,
    ) as progress:
        bar = progress.add_task("steps", total=steps)

        def write(record: Record) -> None:
            match record:
                case Start():
                    terminal.print(
                        f"{_ranks(record.ranks)} ({record.layout}), {record.parameters} "
                        f"parameters, gradients by {record.algorithm} ({record.reason})"
                    )
                    terminal.print(_HEADER)
                case Step():
                    progress.update(bar, completed=record.step)
                    if record.step == 1 or record.step % log_every == 0:
                        terminal.print(_line(record))
                case Epoch():
                    terminal.print(
                        f"epoch {record.epoch}: test accuracy {record.test_accuracy:.2%}, "
                        f"loss {record.test_loss:.4f}"
                    )
                case Skipped():
                    terminal.print(
                        f"step {record.step} skipped: not finite ({record.culprits}); loss scale "
                        f"{record.loss_scale:g}"
                    )
                case Straggler():
                    terminal.print(
                        f"rank {record.rank} on {record.host} keeps the others waiting: "
                        f"{record.factor:.1f} times their time up to step {record.step}"
                    )
                case Saved():
                    terminal.print(f"checkpoint {record.path} ({record.seconds:.2f} s)")
                case Resumed():
                    for why in record.refused:
                        terminal.print(f"checkpoint refused: {why}")
                    terminal.print(f"resumed after step {record.step} from {record.path}")
                case Summary():
                    terminal.print(str(record))

        yield write


def _is_watched(terminal: Console) -> bool:
    # Open MPI gives rank 0 a pseudo-terminal even if mpirun writes to a file; that one has no size.
    return terminal.is_terminal and os.get_terminal_size(terminal.file.fileno()).columns > 0


_HEADER = f"{'step':>6} {'loss':>9} {'grad_norm':>9} {'lr':>9} {'samples/s':>9} {'comm%':>6}"


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"


def _line(record: Step) -> str:
    return (
        f"{record.step:6d} {record.loss:9.4f} {record.grad_norm:9.4f} {record.lr:9.4g} "
        f"{record.samples_per_s:9.0f} {100 * record.comm_share:6.1f}"
    )
