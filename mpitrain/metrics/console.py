"""Records as lines for people."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from mpitrain.metrics.records import (
    Epoch,
    Record,
    Resumed,
    Round,
    Saved,
    Skipped,
    Start,
    Step,
    Straggler,
    Summary,
    Write,
)
from mpitrain.metrics.words import counted, summed


@contextmanager
def console(steps: int, log_every: int) -> Iterator[Write]:
    """Prints lines, every ``log_every`` steps, and a progress bar on a terminal."""
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

        def say(text: str) -> None:
            # A name that the terminal cannot show, as that of a folder, must not end a run.
            code = terminal.encoding
            terminal.print(text.encode(code, "backslashreplace").decode(code))

        def write(record: Record) -> None:
            match record:
                case Start():
                    say(
                        f"{counted(record.ranks, 'rank')} ({record.layout}), {record.parameters} "
                        f"parameters, gradients {summed(record.algorithm, record.reason)}"
                    )
                    if record.config.get("run", {}).get("random") == "local":
                        say("random numbers of torch modules: they depend on the layout")
                    say(_HEADER)
                case Step():
                    progress.update(bar, completed=record.step)
                    if record.step == 1 or record.step % log_every == 0:
                        say(_line(record))
                case Round():
                    if record.step == 1 or record.step % log_every == 0:
                        say(str(record))
                case Epoch():
                    say(str(record))
                case Skipped():
                    say(
                        f"step {record.step} skipped: not finite ({record.culprits}); loss scale "
                        f"{record.loss_scale:g}"
                    )
                case Straggler():
                    say(
                        f"rank {record.rank} on {record.host} keeps the others waiting: "
                        f"{record.factor:.1f} times their time up to step {record.step}"
                    )
                case Saved():
                    say(f"checkpoint {record.path} ({record.seconds:.2f} s)")
                case Resumed():
                    for why in record.refused:
                        say(f"checkpoint refused: {why}")
                    say(f"resumed after step {record.step} from {record.path}")
                    for note in record.notes:
                        say(f"resumed: {note}")
                case Summary():
                    say(str(record))

        yield write


def _is_watched(terminal: Console) -> bool:
    # Open MPI gives rank 0 a pseudo-terminal even if mpirun writes to a file; that one has no size.
    try:
        return terminal.is_terminal and os.get_terminal_size(terminal.file.fileno()).columns > 0
    except (OSError, ValueError):  # FORCE_COLOR says that a file or a pipe is a terminal
        return False


_HEADER = (
    f"{'step':>6} {'loss':>9} {'grad_norm':>9} {'lr':>9} {'samples/s':>9} "
    f"{'reduce%':>7} {'wait%':>5}"
)


def _line(record: Step) -> str:
    synced = f"  {record.sync}" if record.sync else ""
    return (
        f"{record.step:6d} {record.loss:9.4f} {record.grad_norm:9.4f} {record.lr:9.4g} "
        f"{record.samples_per_s:9.0f} {100 * record.comm_share:7.1f} "
        f"{100 * record.wait_share:5.1f}{synced}"
    )
