"""Commands that need no ranks."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from collectives import LaunchError
from collectives.about import has_no_mpi, load_mpi
from collectives.commands import above_zero, add_ranks, also, positive
from mpitrain import extras
from mpitrain.commands import methods, scale, schedules, search, submitting
from mpitrain.commands.arguments import add_job
from mpitrain.commands.machine import add_machine
from mpitrain.config import ConfigError, load
from mpitrain.config import examples as packaged

if TYPE_CHECKING:
    from collectives.commands import Commands

#: Layers times workers that the dynamic program divides in a few hours.
_MOST = 1 << 17


def add(commands: "Commands") -> None:
    """Adds the commands."""
    parser = commands.add_parser(
        "plan", help="print ranks, groups, stages, memory and predicted time before anything runs"
    )
    add_job(parser)
    add_machine(parser)
    other = (
        "another layout to compare with the job's, as 'data=2,pipe=2': keys of "
        "[parallel], or micro_batches; may be given several times"
    )
    parser.add_argument("--against", action="append", default=[], metavar="KEYS", help=other)
    own = "measured compute time of a step in ms, in the place of the predicted one"
    parser.add_argument("--step-ms", type=above_zero, metavar="MS", help=own)
    parser.set_defaults(act=extras.plan)
    scale.add(commands)
    methods.add(commands)
    parser = commands.add_parser(
        "keys", help="print the keys of a job file: defaults, values, meanings"
    )
    which = "a table or a key, as optim or optim.lr (all)"
    parser.add_argument("table", nargs="?", metavar="NAME", help=which)
    parser.add_argument("--markdown", action="store_true", help="print a page in Markdown")
    parser.set_defaults(
        act=lambda options: extras.keys(options.table, as_markdown=options.markdown)
    )
    schedules.add(commands)
    search.add(commands)
    _add_partition(commands)
    parser = commands.add_parser("submit", help="submit a job to SLURM or PBS, or print its script")
    add_job(parser, needed=False)
    submitting.add(parser)
    parser.set_defaults(act=submit)
    _add_runs(commands)


def _add_partition(commands: "Commands") -> None:
    text = "cut a profile into replicated stages (PipeDream's dynamic program)"
    parser = commands.add_parser("partition", help=text)
    add = parser.add_argument
    add("profile", type=Path, help="file of 'mpitrain profile', or PipeDream's text format")
    add_ranks(parser)
    also(parser, "--workers", "--ranks")
    add("--bandwidth", type=_gigabytes, default=1.25, help="GB/s between nodes (1.25)")
    add("--per-node", type=positive, default=1, help="ranks of each node (1)")
    add("--inside", type=_gigabytes, default=10.0, help="GB/s within a node (10)")
    add("--servers", action="store_true", help="price a parameter server, not an all-reduce")
    add("--exposed", action="store_true", help="add the all-reduce's time (default: hidden)")
    add("--memory", type=_gigabytes, metavar="GIB", help="GiB that a rank may use (no limit)")
    parser.set_defaults(act=cut)


def _gigabytes(text: str) -> float:
    """GB/s or GiB; bytes, as these options had them, are refused."""
    if (value := above_zero(text)) >= 1e6:
        raise argparse.ArgumentTypeError(f"{text} is too much: GB/s or GiB are wanted, not bytes")
    return value


def _add_runs(commands: "Commands") -> None:
    """Adds the commands that read or write folders."""
    text = "write one HTML file of a run: how it ended, curves, whom ranks waited for"
    parser = commands.add_parser("report", help=text)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.set_defaults(act=lambda options: print(extras.report(options.run)))
    text = "show the runs of a folder in one table, best first"
    parser = commands.add_parser("compare", help=text)
    parser.add_argument("runs", type=Path, help="a folder of runs, as jobs/sweep.sbatch makes it")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw their losses, as PNG or SVG"
    )
    parser.set_defaults(act=lambda given: print(extras.compare(given.runs, given.plot), end=""))
    text = "list the example jobs that come with the package"
    commands.add_parser("examples", help=text).set_defaults(act=examples)
    parser = commands.add_parser("init", help="copy the example jobs and job scripts to a folder")
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder in which jobs/ is made")
    parser.set_defaults(act=init)
    text = "write a checkpoint's parameters as one safetensors file"
    parser = commands.add_parser("export", help=text)
    parser.add_argument("checkpoint", type=Path, help="folder of a checkpoint, or of a run")
    parser.add_argument("output", type=Path, help="file to write, or a folder that is there")
    axes = "order the axes as torch does: (out, in), (out, in, rows, columns)"
    parser.add_argument("--torch", action="store_true", help=axes)
    parser.set_defaults(act=export)


def run(options: argparse.Namespace) -> int:
    """Run one command; returns the exit code."""
    try:
        options.act(options)
    except BrokenPipeError:
        raise
    except (ConfigError, ValueError, RuntimeError, OSError, ImportError) as error:
        message: Exception | str = error
        if has_no_mpi():
            try:
                load_mpi()
            except LaunchError as missing:
                message = missing
        if isinstance(error, OSError) and error.strerror:
            place = f"{error.filename}: " if error.filename else ""
            message = f"{place}{error.strerror}; name another file or folder"
        print(f"mpitrain: {message}", file=sys.stderr)
        return 2
    return 0


def cut(options: argparse.Namespace) -> None:
    """Partition a profile."""
    from mpitrain.pipeline.partition import Costs, TwoLevelLinks, describe, partition
    from mpitrain.pipeline.profiles import read_profile

    profile = read_profile(options.profile)
    if len(profile) * options.ranks > _MOST:
        raise ConfigError(
            f"-n {options.ranks}: {len(profile)} layers on as many ranks take hours; give a part "
            f"of the ranks, at most {_MOST // len(profile)}"
        )
    nodes = [rank // options.per_node for rank in range(options.ranks)]
    nodes = nodes if options.per_node > 1 else []
    links = TwoLevelLinks(1e9 * options.bandwidth, 1e9 * options.inside, nodes)
    memory = options.memory and 2**30 * options.memory
    servers, hidden = options.servers, not options.exposed
    costs = Costs(profile, links, memory, servers=servers, hidden=hidden)
    print(describe(partition(costs, options.ranks), lambda _: costs))


def export(options: argparse.Namespace) -> None:
    """Write a checkpoint's parameters."""
    from mpitrain.checkpoint.export import export as write

    done = write(options.checkpoint, options.output, torch=options.torch)
    for why in done.refused:
        print(f"checkpoint refused: {why}", file=sys.stderr)
    print(f"{done.tensors} tensors of {done.folder} written to {options.output}")


def submit(options: argparse.Namespace) -> None:
    """Submit a job, or print its script."""
    print(submitting.run(options), end="" if options.dry_run else "\n")


def examples(options: argparse.Namespace) -> None:
    """List the example jobs."""
    found = packaged.examples()
    for name, path in found.items():
        reads = Path(load(path).data.path).name
        print(f"{name:<17} {packaged.summary(path)}" + (f" Reads {reads}." if reads else ""))
    print(f"in {packaged.folder() / 'examples'}; --set data.path=FILE reads another text")


def init(options: argparse.Namespace) -> None:
    """Copy the examples and scripts."""
    print(f"{packaged.copy(options.folder)} has the job scripts; its examples/ has the jobs")
