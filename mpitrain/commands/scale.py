"""``mpitrain scale``: one job on several numbers of ranks, and how well it scales."""

import argparse
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from math import inf, isfinite, isnan, nan
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from collectives.commands import add_ranks, add_virtual, in_words, positive
from collectives.files import replace as replace_file
from mpitrain.commands.arguments import add_costs, add_job
from mpitrain.commands.search import file
from mpitrain.config import Config, ConfigError, Own, Server, load
from mpitrain.config.metric_names import is_better_higher
from mpitrain.metrics.reader import Log, read_records
from mpitrain.metrics.records import Epoch, Step
from mpitrain.metrics.words import digits

if TYPE_CHECKING:
    from collectives.commands import Commands
    from mpitrain.search.job import Job


class Size(msgspec.Struct, frozen=True):
    """One number of ranks; what is not known is nan.

    Attributes:
        ranks, workers, batch: all ranks, those that are no servers, and samples of a step.
        step_s, samples_per_s: mean seconds of a step, and throughput.
        speedup, efficiency: throughput over that of the fewest workers, in all and a worker.
        serial: share of the work that more workers do not share, by Amdahl's law (Karp & Flatt
            1990).
        hours: of the whole training.
        steps, epochs, seconds: until the goal.
    """

    ranks: int
    workers: int
    batch: int
    step_s: float
    samples_per_s: float
    speedup: float = 1.0
    efficiency: float = 1.0
    serial: float = nan
    hours: float = nan
    steps: float = nan
    epochs: float = nan
    seconds: float = nan


#: Columns of a row: their heads, and factors on the fields.
_COLUMNS = {
    "ranks": 1, "workers": 1, "batch": 1, "ms a step": 1e3, "samples/s": 1, "speed-up": 1,
    "efficiency%": 100, "serial%": 100, "hours": 1, "steps": 1, "epochs": 1, "seconds": 1,
}  # fmt: skip


def add(commands: "Commands") -> None:
    """Adds the command."""
    text = "train a job on several numbers of ranks, and print how well it scales"
    more = (
        "; mpiexec starts the ranks.  Speed-up and efficiency compare with the fewest workers, "
        "without servers; serial is Amdahl's share; the first step of a run does not count."
    )
    parser = commands.add_parser("scale", help=text, description=text.capitalize() + more)
    add_job(parser)
    add_ranks(parser, "1,2,4,8")
    add = parser.add_argument
    add("--weak", action="store_true", help="let the batch grow with the workers")
    add("--steps", type=positive, help="steps of each run (the job's)")
    goal = (
        "a goal, whose steps, epochs and seconds are printed: loss=0.3 (of training, mean of 10 "
        "steps), test_loss=0.3, accuracy=0.95, or 'higher score=0.9' for a metric of your own"
    )
    add("--until", type=_goal, metavar="NAME=VALUE", help=goal)
    add("--plot", type=file, metavar="FILE", help="picture to draw, PNG or SVG")
    add("--json", type=file, metavar="FILE", help="file for the rows")
    add("--virtual", action="store_true", help="run virtual ranks, as 'train --virtual' does")
    add_virtual(parser)
    add_costs(parser)
    parser.set_defaults(act=run)


def _goal(text: str) -> tuple[str, float]:
    """A goal from ``name=value``."""
    name, _, value = text.partition("=")
    with suppress(ValueError):
        if isfinite(goal := float(value)):
            return name, goal
    raise argparse.ArgumentTypeError(f"expected a goal, as loss=0.3, got {text!r}")


def _direction(goal: str) -> tuple[str, bool]:
    """The name of a goal, and whether a higher value is better; ConfigError: nothing says so."""
    word, _, rest = goal.partition(" ")
    name = rest if word in ("higher", "lower") else goal
    higher = is_better_higher(name.removeprefix("test_")) if name == goal else word == "higher"
    if higher is None:
        raise ConfigError(
            f"--until: nothing says whether a higher {name!r} is better; write 'higher {name}=...' "
            f"or 'lower {name}=...'"
        )
    return name, higher


def run(options: argparse.Namespace) -> None:
    """Print a row for each number of ranks; draw and write them."""
    from mpitrain.search.job import load_job
    from mpitrain.search.whole import operations, steps

    if options.plot:
        _draw((), options.plot)  # refused now rather than when all is trained
    if options.until:
        _direction(options.until[0])
    config, work = load(options.config, options.set), 0.0
    job: Job | None = None
    if config.own == Own() and not config.federated.clients:
        job = load_job(replace(config, server=Server()), "mpitrain scale")
        work = (operations(job) or 0) * steps(job, config) * config.train.batch_size
    kind = "weak" if options.weak else "strong"
    where = f"virtual ranks, {in_words(options)}" if options.virtual else "real ranks"
    title = f"{options.config}, {kind} scaling, {where}"
    print(f"{title}; whole training: {work:.3g} operations" if work else title)
    columns = len(_COLUMNS) if options.until else -3
    print(" ".join(f"{head:>11}" for head in [*_COLUMNS][:columns]))
    found = list[Size]()
    with tempfile.TemporaryDirectory(prefix=".scale-", dir=".") as folder:
        for ranks in sorted(set(options.ranks)):
            found.append(_size(options, config, job, ranks, found, Path(folder)))
            if options.json:  # each time, as a larger size may fail after hours
                told = {"title": title, "operations": work or None, "rows": found}
                text = msgspec.json.format(msgspec.json.encode(told)).decode()
                replace_file(options.json, text + "\n")
            values = zip(msgspec.structs.astuple(found[-1]), _COLUMNS.values(), strict=True)
            cells = ["-" if isnan(value) else digits(value * factor) for value, factor in values]
            print(" ".join(f"{cell:>11}" for cell in cells[:columns]), flush=True)
    if any(size.serial > 1 for size in found):
        print(
            "serial% above 100: communication, which grows, makes this job slower on more workers"
        )
    if options.plot:
        _draw(found, options.plot)


def _size(
    options: argparse.Namespace, config: Config, job: "Job | None", ranks: int,
    before: Sequence[Size], folder: Path,
) -> Size:  # fmt: skip
    """Train on so many ranks; ``before``: what was found on fewer."""
    from mpitrain.search.whole import steps

    batch, grows = config.train.batch_size, 1.0
    if options.weak and before:
        more = round(batch * (ranks - config.server.ranks) / before[0].workers)
        config, grows = replace(config, train=replace(config.train, batch_size=more)), more / batch
    sets = [*options.set, f"train.batch_size={config.train.batch_size}"]
    sets += [f"train.steps={options.steps}"] if options.steps else []
    virtual = None
    if options.virtual:
        slower = options.slower * (grows if options.costs else 1)  # a profile has one batch
        virtual = ["--costs", str(options.costs)] if options.costs else []
        virtual += ["--async-progress"] if options.async_progress else []
        virtual += ["--topology", options.topology, "--slower", str(slower)]
        virtual += ["--alpha", str(options.alpha), "--bandwidth", str(options.bandwidth)]
    try:
        log = trained(str(options.config), ranks, sets, folder / str(ranks), virtual)
    except ConfigError as error:
        if isinstance(error.__cause__, OSError):
            raise ConfigError(f"{error}, or give --virtual") from error
        raise
    found = measured(log, config.server.ranks, *before[:1])
    if job and (whole := steps(job, config)):
        found = replace(found, hours=found.step_s * whole / 3600)
    if options.until:
        (name, goal), size = options.until, len(job.data.train) if job else 0
        count, epochs, seconds = reached(log, name, goal, size)
        found = replace(found, steps=count, epochs=epochs, seconds=seconds)
    return found


def trained(
    job: str, ranks: int, sets: Sequence[str], folder: Path,
    virtual: Sequence[str] | None = None, limit: float = inf,
) -> Log:  # fmt: skip
    """The records of a job with other values ``sets``, which it writes to ``folder``.

    ``virtual``: further words of ``train --virtual``; None: real ranks.  ConfigError, with the
    job's own words: it cannot be trained, or takes longer than ``limit`` seconds.
    """
    from mpitrain.search.on_ranks import on_ranks, output

    words = ["mpitrain", "train", job, *(f"--set={own}" for own in (*sets, f"run.dir={folder}"))]
    if virtual is None:
        on_ranks(ranks, *words, seconds=limit)
    else:
        words = [sys.executable, "-m", *words, "--virtual", str(ranks), *virtual]
        output(words, f"--virtual {ranks}", limit)
    return read_records(folder / "metrics.jsonl")


def measured(log: Log, servers: int = 0, first: Size | None = None) -> Size:
    """The speed of a run but for its first step, in which plans are made.

    ``first``: the run of the fewest workers; None: it is this one.
    """
    if not (steps := log.of(Step)[1:]):
        raise ConfigError("the run has no step after the first to measure; give --steps 2 or more")
    seconds, ranks = sum(one.seconds for one in steps), log.start().ranks
    samples, most = sum(one.samples for one in steps), max(one.samples for one in steps)
    own = Size(ranks, ranks - servers, most, seconds / len(steps), samples / seconds)
    if first is None:
        return own
    times, speedup = own.workers / first.workers, own.samples_per_s / first.samples_per_s
    serial = (1 / speedup - 1 / times) / (1 - 1 / times) if most == first.batch else nan
    return replace(own, speedup=speedup, efficiency=speedup / times, serial=serial)


def reached(log: Log, name: str, goal: float, size: int = 0) -> tuple[float, float, float]:
    """Steps, epochs and seconds until a goal; nan: it was not reached.

    ``size``: samples of an epoch; 0: not known.  ConfigError: tests do not measure the goal.
    """
    step, seconds, samples, last = 0, 0.0, 0, deque[float](maxlen=10)
    name, higher = _direction(name)
    if name != "loss" and not log.of(Epoch):
        raise ConfigError(f"--until {name}: the job has nothing to test on; take loss")
    for record in log.records:
        value = nan
        if isinstance(record, Step):
            step, samples = record.step, samples + record.samples
            seconds += record.seconds
            last.append(record.loss)
            value = fmean(last) if name == "loss" else nan
        elif isinstance(record, Epoch) and name != "loss":
            tested = {"test_loss": record.test_loss, **record.metrics}
            if name not in tested:
                raise ConfigError(
                    f"--until {name}: tests measure {', '.join(tested)}; give one of them, or loss"
                )
            value = tested[name]
        if value >= goal if higher else value <= goal:
            return step, samples / size if size else nan, seconds
    return nan, nan, nan


def _draw(found: Sequence[Size], path: Path) -> None:
    """Draw speed-up and efficiency by the number of workers."""
    from mpitrain.pipeline.draw import figure

    drawn, workers = figure(figsize=(8, 3.4)), [one.workers for one in found]
    for axes, name in zip(drawn.subplots(1, 2), ("speedup", "efficiency"), strict=True):
        axes.plot(workers, [getattr(one, name) for one in found], marker="o")
        ideal = [one / workers[0] if name == "speedup" else 1 for one in workers]
        axes.plot(workers, ideal, "--", color="grey", label="ideal")
        axes.legend()
        axes.set(xlabel="workers", ylabel=name, ylim=(0, None))
    drawn.savefig(path, dpi=150)
