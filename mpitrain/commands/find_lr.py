"""``mpitrain find-lr``: a search for a learning rate; its result as a table."""

import argparse

from rich.console import Console
from rich.table import Table

from collectives import Communicator
from mpitrain.commands import ranks
from mpitrain.config import Config, expect
from mpitrain.optim.schedule_table import Factor
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


def run(comm: Communicator, options: argparse.Namespace) -> int:
    """Try learning rates."""
    config = ranks.load_once(comm, options)
    expect(config, "steps", command="mpitrain find-lr")
    limits = {"least": options.least, "most": options.most, "steps": options.steps}

    def make(comm: Communicator, job: Config, factor: Factor) -> Loop:
        # An optimiser of the program's own brings its rate, which would replace the job's.
        return ranks.loop_of_job(comm, job, factor, {"optim": {"lr": job.optim.lr}})

    found = find(comm, config, make, **limits)
    if comm.rank == 0:
        print(table(found))
    return 0
