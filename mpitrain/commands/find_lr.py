"""``mpitrain find-lr``: a search for a learning rate; its result as a table and as a picture."""

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from collectives import CollectiveError, Communicator
from collectives.analysis import expect_picture
from mpitrain.commands import ranks
from mpitrain.config import Config, ConfigError, expect
from mpitrain.optim.schedule_table import Factor
from mpitrain.pipeline.draw import figure
from mpitrain.ranks.together import by_rank_0
from mpitrain.training.find_lr import RangeTest, find
from mpitrain.training.loop import Loop

_ROWS = 20


def table(found: RangeTest) -> str:
    """Lines of the report: some of the steps, why they ended, and which rate to try."""
    rows = Table(box=None)
    for column in ("step", "optim.lr", "loss", "smoothed"):
        rows.add_column(column, justify="right", no_wrap=True)
    last = len(found.tried) - 1
    every = -(-len(found.tried) // _ROWS)
    for index, one in enumerate(found.tried):
        if index % every == 0 or index == last:
            rows.add_row(str(index + 1), f"{one.lr:.3g}", f"{one.loss:.4f}", f"{one.smoothed:.4f}")
    console = Console(width=80, force_terminal=False)  # rank 0 may have a terminal of its own
    with console.capture() as capture:
        console.print(rows)
    return f"{capture.get()}ended after {last + 1} steps: {found.why}\n{suggestion(found)}"


def suggestion(found: RangeTest) -> str:
    """Sentence that says which rate to try."""
    if found.steepest is None or found.tenth is None:
        return "the loss has not fallen: try a smaller --least, or more --steps"
    return (
        f"try optim.lr={found.tenth:.2g}, a tenth of the rate where the loss is least; it falls "
        f"the most about {found.steepest:.2g}"
    )


def picture(found: RangeTest, path: Path) -> None:
    """Draw the loss over the learning rate to a PNG or SVG file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    drawn = figure(figsize=(7, 4))
    axes = drawn.subplots()
    rates = [one.lr for one in found.tried]
    axes.plot(rates, [one.loss for one in found.tried], color="0.75", label="loss")
    axes.plot(rates, [one.smoothed for one in found.tried], label="smoothed")
    for rate, style, label in (
        (found.steepest, "--", "steepest fall"),
        (found.tenth, ":", "least / 10"),
    ):
        if rate is not None:
            axes.axvline(rate, color="0.3", linestyle=style, label=f"{label}: {rate:.2g}")
    axes.set_xscale("log")
    if found.tried:  # a diverging loss would flatten the rest of the curve
        axes.set_ylim(0, 2 * max(one.smoothed for one in found.tried[: len(found.tried) // 2 + 1]))
    axes.set_xlabel("optim.lr")
    axes.set_ylabel("loss")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    drawn.savefig(path, dpi=150)


def run(comm: Communicator, options: argparse.Namespace) -> int:
    """Try learning rates."""
    config = ranks.load_once(comm, options)
    expect(config, "steps", command="mpitrain find-lr")

    def expect_output() -> None:  # fails now, rather than after the rates have been tried
        if options.output:
            try:
                figure()
                expect_picture(options.output)
            except (CollectiveError, ImportError) as error:
                raise ConfigError(f"--output: {error}") from error

    by_rank_0(comm, expect_output, ConfigError)
    limits = {"least": options.least, "most": options.most, "steps": options.steps}

    def make(comm: Communicator, job: Config, factor: Factor) -> Loop:
        # An optimiser of the program's own brings its rate, which would replace the job's.
        return ranks._loop(comm, job, factor, {"optim": {"lr": job.optim.lr}})

    found = find(comm, config, make, **limits)

    def act() -> None:
        print(table(found))
        if options.output:
            try:
                picture(found, options.output)
            except (OSError, ValueError, ImportError) as error:
                raise ConfigError(f"--output {options.output}: {error}") from error
            print(f"drawn in {options.output}")

    by_rank_0(comm, act, ConfigError)
    return 0
