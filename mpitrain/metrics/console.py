"""Records as lines for people."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from mpitrain.metrics.records import (
    Back,
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
from mpitrain.metrics.words import counted, in_words, summed


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
        start = Start(1, [], "", [], "", "", 0, {})

        def say(text: str) -> None:
            # A name that the terminal cannot show, as that of a folder, must not end a run.
            code = terminal.encoding
            terminal.print(text.encode(code, "backslashreplace").decode(code))

        def write(record: Record) -> None:
            nonlocal start
            match record:
                case Start():
                    start = record
                    say(
                        f"{counted(record.ranks, 'rank')} ({record.layout}), {record.parameters} "
                        f"parameters, gradients {summed(record.algorithm, record.reason)}"
                    )
                    if record.config.get("run", {}).get("random") == "local":
                        say("random numbers of torch modules: they depend on the layout")
                    if record.peak:
                        say(f"peak {record.peak / 1e9:.4g} GFLOP/s of all ranks, measured")
                    say(" ".join(_columns(record, Step(0, 0, 0, 0, 0, 0, 0, 0, 0))))
                case Step():
                    progress.update(bar, completed=record.step)
                    if record.step == 1 or record.step % log_every == 0:
                        more = [f"  {one}" for one in (record.sync, record.noise) if one]
                        say(" ".join(_columns(start, record).values()) + "".join(more))
                case Round():
                    if record.step == 1 or record.step % log_every == 0:
                        say(str(record))
                case Epoch() | Summary() | Back():
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

        yield write


def _is_watched(terminal: Console) -> bool:
    # Open MPI gives rank 0 a pseudo-terminal even if mpirun writes to a file; that one has no size.
    try:
        return terminal.is_terminal and os.get_terminal_size(terminal.file.fileno()).columns > 0
    except (OSError, ValueError):  # FORCE_COLOR says that a file or a pipe is a terminal
        return False


def _columns(start: Start, step: Step) -> dict[str, str]:
    """Values of a step's line by the heads of their columns, each as wide as its values."""
    per_s = step.samples_per_s * (start.tokens or 1)
    found = {
        "  step": f"{step.step:6d}",
        "     loss": f"{step.loss:9.4f}",
        "grad_norm": f"{step.grad_norm:9.4f}",
        "       lr": f"{step.lr:9.4g}",
        f"{'tokens/s' if start.tokens else 'samples/s':>9}": f"{per_s:9.0f}",
    }
    if start.peak:
        found[" mfu%"] = f"{600 * start.parameters * per_s / start.peak:5.1f}"
    shares = {"reduce%": step.comm_share, "wait%": step.wait_share, "read%": step.read_share}
    found["  memory"] = f"{in_words(step.memory):>8}"
    return found | {name: f"{100 * share:{len(name)}.1f}" for name, share in shares.items()}
