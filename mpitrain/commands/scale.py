"""``mpitrain scale``: one job on several numbers of ranks, and how well it scales."""

import argparse
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from collectives import CollectiveError
from collectives.commands import add_ranks, add_virtual, in_words, positive
from collectives.files import replace as replace_file
from mpitrain.commands.arguments import add_costs, add_job
from mpitrain.commands.search import file
from mpitrain.config import Config, ConfigError, Own, Server, load
from mpitrain.metrics.words import digits

if TYPE_CHECKING:
    from collectives.commands import Commands
    from mpitrain.search.job import Job
    from mpitrain.search.sizes import Goal, Size

_HEADS = (
    "ranks", "workers", "batch", "ms a step", "samples/s", "speed-up", "efficiency", "serial",
    "hours", "steps", "epochs", "seconds",
)  # fmt: skip


def add(commands: "Commands") -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "scale",
        help="train a job on several numbers of ranks, and print how well it scales",
        description="Train a job on several numbers of ranks, which mpiexec starts, or on virtual "
        "ones.  Print the time of a step (without the first one), the speed-up and efficiency "
        "beside the fewest ranks, Amdahl's serial share, and the hours of the whole training; "
        "servers are no workers.",
        epilog="example: %(prog)s digits_mlp -n 1,2,4,8 --virtual --until loss=0.3",
    )
    add_job(parser)
    add_ranks(parser, "1,2,4,8")
    add = parser.add_argument
    add("--weak", action="store_true", help="let the batch grow with the workers")
    add("--steps", type=positive, help="steps of each run (the job's)")
    goal = (
        "also print when training reaches a goal: loss=0.3 (of training, mean of 10 steps), "
        "test_loss=0.3, accuracy=0.95 or another metric of tests"
    )
    add("--until", type=_goal, metavar="NAME=VALUE", help=goal)
    add("--plot", type=file, metavar="FILE", help="picture to draw, PNG or SVG")
    add("--json", type=file, metavar="FILE", help="file for the rows")
    virtual = "run the ranks as threads of one process, on the clock of a modelled network"
    add("--virtual", action="store_true", help=virtual)
    add_virtual(parser)
    add_costs(parser)
    parser.set_defaults(act=run)


def run(options: argparse.Namespace) -> None:
    """Print a row for each number of ranks; draw and write them."""
    from mpitrain.search.whole import operations, steps

    if options.plot:
        from collectives.analysis import expect_picture
        from mpitrain.pipeline.draw import figure

        try:  # refused now rather than when all is trained
            expect_picture(options.plot)
        except CollectiveError as error:
            raise ConfigError(f"--plot: {error}") from error
        figure()
    config = load(options.config, options.set)
    job, total = _whole(config), math.nan
    if job and (each := operations(job)):
        total = each * config.train.batch_size * steps(job, config) or math.nan
    where = f"virtual ranks, {in_words(options)}" if options.virtual else "real ranks"
    kind = "weak" if options.weak else "strong"
    title = f"{options.config}, {kind} scaling, {where}"
    print(title if math.isnan(total) else f"{title}; whole training: {total:.3g} operations")
    columns = len(_HEADS) if options.until else -3
    print(_row(_HEADS[:columns]))
    sizes = list["Size"]()
    with tempfile.TemporaryDirectory(prefix=".scale-", dir=".") as folder:
        for ranks in sorted(set(options.ranks)):
            sizes.append(_size(options, config, job, ranks, sizes, Path(folder)))
            print(_row(_told(sizes[-1])[:columns]), flush=True)
    if options.json:
        rows = [{k: v for k, v in one._asdict().items() if not math.isnan(v)} for one in sizes]
        found = {"job": str(options.config), "scaling": kind, "where": where, "rows": rows}
        found |= {} if math.isnan(total) else {"operations": total}
        replace_file(options.json, json.dumps(found, indent=1) + "\n")
    if options.plot:
        _draw(sizes, title, options.plot)


def _goal(text: str) -> "Goal":
    """A goal from ``name=value``."""
    from mpitrain.search.sizes import Goal

    name, _, value = text.partition("=")
    try:
        return Goal(name, float(value))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a goal, as loss=0.3, got {text!r}") from None


def _whole(config: Config) -> "Job | None":
    """The job for its operations and steps, if they can be counted."""
    from mpitrain.search.job import load_job

    if config.own != Own() or config.federated.clients:
        return None
    return load_job(replace(config, server=Server()), "mpitrain scale")


def _size(
    options: argparse.Namespace,
    config: Config,
    job: "Job | None",
    ranks: int,
    before: Sequence["Size"],
    folder: Path,
) -> "Size":
    """Train on so many ranks; ``before``: what was found on fewer."""
    from mpitrain.search.sizes import measured, reached, trained
    from mpitrain.search.whole import steps

    batch, grows, costs = config.train.batch_size, 1.0, options.costs
    if options.weak and before:
        grows = (ranks - config.server.ranks) / before[0].workers
        if not (batch * grows).is_integer():
            raise ConfigError(
                f"--weak: a batch of {batch} samples grows to {batch * grows:.2f} on {ranks} "
                "ranks; set train.batch_size to a multiple of the fewest workers"
            )
        config = replace(config, train=replace(config.train, batch_size=int(batch * grows)))
    sets = [*options.set, f"train.batch_size={config.train.batch_size}"]
    sets += [f"train.steps={options.steps}"] if options.steps else []
    virtual = None
    if options.virtual:
        virtual = ["--async-progress"] if options.async_progress else []
        for name in ("topology", "alpha", "bandwidth", "slower"):
            virtual += [f"--{name}", str(getattr(options, name))]
        virtual += ["--costs", str(_grown(costs, grows, folder))] if costs else []
    log = trained(str(options.config), ranks, sets, folder / str(ranks), virtual)
    found = measured(log, config.server.ranks)
    if job and (whole := steps(job, config)):
        found = found._replace(hours=found.step_s * whole / 3600)
    if options.until:
        count, epochs, seconds = reached(log, options.until, len(job.data.train) if job else 0)
        found = found._replace(steps=count, epochs=epochs, seconds=seconds)
    return found.beside(before[0] if before else found)


def _grown(costs: Path, times: float, folder: Path) -> Path:
    """A profile, or one of a micro-batch that is ``times`` as large, in ``folder``."""
    from msgspec.structs import replace

    from mpitrain.pipeline.profiles import read_profile, write_profile

    if times == 1:
        return costs
    layers = [
        replace(one, forward_s=times * one.forward_s, backward_s=times * one.backward_s)
        for one in read_profile(costs)
    ]
    write_profile(folder / "costs.json", layers)
    return folder / "costs.json"


def _told(size: "Size") -> list[str]:
    """The cells of a row; what is not known is a dash."""
    ranks, workers, batch, step, rate, speedup, efficiency, serial, *rest = size
    cells = [1e3 * step, rate, speedup, 100 * efficiency, 100 * serial, *rest]
    told = ["-" if math.isnan(cell) else digits(cell) for cell in cells]
    units = ["", "", "", "%", "%", "", "", "", ""]
    told = [text + unit * (text != "-") for text, unit in zip(told, units, strict=True)]
    return [str(ranks), str(workers), str(batch), *told]


def _row(cells: Sequence[str]) -> str:
    return " ".join(f"{cell:>10}" for cell in cells)


def _draw(sizes: Sequence["Size"], title: str, path: Path) -> None:
    """Draw speed-up and efficiency by the number of workers, and the seconds to a goal."""
    from mpitrain.pipeline.draw import figure

    workers = [one.workers for one in sizes]
    panels = {"speed-up": [one.speedup for one in sizes]}
    panels["efficiency"] = [one.efficiency for one in sizes]
    if any(not math.isnan(one.seconds) for one in sizes):
        panels["seconds to the goal"] = [one.seconds for one in sizes]
    drawn = figure(figsize=(4 * len(panels), 3.4))
    for axes, (name, values) in zip(drawn.subplots(1, len(panels)), panels.items(), strict=True):
        axes.plot(workers, values, marker="o")
        axes.set(xlabel="workers", ylabel=name, xticks=workers)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        if name == "speed-up":
            ideal = [one / workers[0] for one in workers]
            axes.plot(workers, ideal, color="0.6", linestyle="--", label="linear")
            axes.legend(frameon=False)
    drawn.suptitle(title, size=9)
    drawn.savefig(path, dpi=150)
