"""``mpitrain search``: the fastest layouts of a job, found before anything runs."""

import argparse
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from collectives.commands import positive
from collectives.files import replace as replace_file
from mpitrain.commands.arguments import add_job
from mpitrain.commands.machine import MOST_RANKS, add_machine, machine
from mpitrain.config import Config, ConfigError, load
from mpitrain.config.numbers import toml
from mpitrain.config.tables import Tables

if TYPE_CHECKING:
    from collectives.commands import Commands
    from mpitrain.search.candidates import Candidate
    from mpitrain.search.layouts import Found, Refusal, Search


def add(commands: "Commands") -> None:
    """Adds the command."""
    text = "find the fastest layouts of a job: all axes, ZeRO, schedules, micro-batches, cuts"
    parser = commands.add_parser("search", help=text)
    add_arguments(parser)
    parser.add_argument("-o", "--output", type=file, help="file for the first one's keys, in TOML")
    text = "train the first K layouts for some steps with mpiexec, and put the fastest one first"
    parser.add_argument("--time", type=positive, metavar="K", help=text)
    text = "choose a layout for each layer, too, beside the best one for all, without a pipeline"
    parser.add_argument("--by-layer", action="store_true", help=text)
    parser.set_defaults(act=run)


def file(text: str) -> Path:
    """A file in a folder that is there, so that a search is not lost."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no file in a folder that is there")
    return path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what describes the job and the machine."""
    add_job(parser)
    add_machine(parser)
    parser.add_argument("--top", type=positive, default=10, help="layouts to show (10)")


def run(options: argparse.Namespace) -> None:
    """Print the fastest layouts, what was refused, and the tables of the first one."""
    from mpitrain.commands.steps import table

    config = load(options.config, options.set)
    sought = job(config, options)
    found = sought.fastest(options.top, refusal(config))
    refused = [f"refused: {count} with {why}" for why, count in sought.refused.most_common()]
    if not found:
        raise ConfigError(
            f"no layout fits; {'; '.join(refused)}; take more ranks, or change what refuses most, "
            "as --memory, train.batch_size or the model"
        )
    rows = [(str(ran), ran.step) for ran in found]
    print("\n".join([*table(rows, sought.batch), *refused]))
    count, all_ = sought.priced[True], sought.priced[False]
    print(f"priced: {count} of {all_} layouts; the others take longer or are refused")
    if options.by_layer:
        from mpitrain.search.by_layer import by_layer

        chosen = by_layer(sought, refusal(config))
        names = [layer.name for layer in sought.layers]
        print("\n".join(chosen.lines(names)) if chosen else "\nby layer: nothing fits")
    if options.time:
        found = _timed(found[: options.time], options)
    tables = _tables(config, found[0])
    print(f"\n{tables}")
    if options.output:
        replace_file(options.output, tables + "\n")


def _timed(found: "list[Found]", options: argparse.Namespace) -> "list[Found]":
    """The layouts by their measured steps, which are printed."""
    timed = sorted([(measured(options, ran), ran) for ran in found], key=lambda one: one[0])
    print("\nmeasured ms", *(f"{1e3 * seconds:11.2f}  {ran}" for seconds, ran in timed), sep="\n")
    return [ran for _, ran in timed]


def measured(options: argparse.Namespace, ran: "Found", steps: int = 20) -> float:
    """Seconds of the median step of a layout, which trains ``steps`` steps with ``mpiexec``.

    Raises:
        ConfigError: the job did not run; the message has what it printed last.
    """
    from mpitrain.commands.scale import trained
    from mpitrain.metrics.records import Step
    from mpitrain.search.on_ranks import START_S

    own = ran.keys() | {"train.steps": steps}
    sets = [*options.set, *(f"{key}={toml(value)}" for key, value in own.items())]
    # Ten times what one core would take for all ranks.
    limit = min(1e6, START_S + 10 * options.ranks * steps * ran.seconds)
    with tempfile.TemporaryDirectory() as folder:
        try:
            log = trained(str(options.config), options.ranks, sets, Path(folder), limit=limit)
        except ConfigError as error:
            raise ConfigError(f"{ran}: {error}; leave --time out, or mend that first") from error
    seconds = [step.seconds for step in log.of(Step)]
    return median(seconds[len(seconds) // 4 :])


def job(config: Config, options: argparse.Namespace) -> "Search":
    """The job, the machine and the costs of the layers.

    Raises:
        ConfigError: ranks take no steps together in the job, nodes do not divide the ranks, or the
            job has what is not searched.
    """
    from mpitrain.search.job import load_job

    if config.parallel.offload != (usual := Tables().parallel.offload):
        raise ConfigError(
            "parallel.offload: mpitrain search finds no layout with it; compare some by plan "
            f"--against, or set parallel.offload = {toml(usual)}"
        )
    if options.ranks > MOST_RANKS:
        raise ConfigError(
            f"search -n {options.ranks}: layouts of at most {MOST_RANKS} ranks are sought; give a "
            "part of the replicas, which all do the same"
        )
    cluster = machine(options)
    return load_job(config, "mpitrain search").search(cluster, is_counted=bool(options.flops))


def refusal(config: Config) -> "Refusal":
    """Says why a layout does not go together with the job's other methods."""
    from mpitrain.search.job import with_layout

    @cache
    def why(layout: "Candidate") -> str:
        try:
            with_layout(config, partition="even", **layout.keys())
        except ValueError as error:
            return str(error)
        return ""

    def told(layout: "Candidate") -> str:
        # Methods go together, or not, whatever the numbers of replicas and micro-batches are.
        some = {"replicas": (2, 1)} if layout.deals else {"data": min(2, layout.data)}
        return why(replace(layout, micro_batches=1, deals=False, **some))

    return told


def _tables(config: Config, ran: "Found") -> str:
    """The keys of a layout as tables of a job file, but those that the job has and are defaults."""
    lines = []
    for table in ("parallel", "train"):
        known = [getattr(tables, table) for tables in (config, Tables())]
        found = []
        for key, value in ran.keys().items():
            own, _, name = key.partition(".")
            if own == table and {getattr(values, name) for values in known} != {value}:
                found.append(f"{name} = {toml(value)}")
        lines += [f"[{table}]", *found] if found else []
    return "\n".join(lines)
