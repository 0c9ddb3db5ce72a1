"""Commands that need no ranks."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from collectives.commands import above_zero, positive
from mpitrain import extras
from mpitrain.commands import methods, schedules, search, submitting
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
    parser.set_defaults(act=extras.plan)
    methods.add(commands)
    parser = commands.add_parser(
        "keys", help="print the keys of a job file: defaults, values, meanings"
    )
    parser.add_argument("table", nargs="?", metavar="TABLE", help="one table, as optim (all)")
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
    add("-n", "--workers", type=positive, required=True, help="number of workers")
    bandwidth = "bandwidth of a link in bytes/s (1.25e9)"
    add("--bandwidth", type=above_zero, default=1.25e9, help=bandwidth)
    add("--per-node", type=positive, default=1, help="workers of each node (1)")
    add("--inside", type=above_zero, default=1e10, help="bandwidth within a node in bytes/s (1e10)")
    add("--servers", action="store_true", help="workers push and pull weights, not an all-reduce")
    add("--exposed", action="store_true", help="no computation hides an all-reduce")
    add("--memory", type=above_zero, help="memory of a worker in bytes (no limit)")
    parser.set_defaults(act=cut)


def _add_runs(commands: "Commands") -> None:
    """Adds the commands that read or write folders."""
    text = "write one HTML file of a run: how it ended, curves, whom ranks waited for"
    parser = commands.add_parser("report", help=text)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.set_defaults(act=lambda options: print(extras.report(options.run)))
    text = "show the runs of a folder in one table, best first"
    parser = commands.add_parser("compare", help=text)
    parser.add_argument("runs", type=Path, help="a folder of runs, as jobs/sweep.sbatch makes it")
    parser.set_defaults(act=lambda options: print(extras.compare(options.runs), end=""))
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
    if len(profile) * options.workers > _MOST:
        raise ConfigError(
            f"-n {options.workers}: {len(profile)} layers on as many workers take hours; give a "
            f"part of the workers, at most {_MOST // len(profile)}"
        )
    nodes = [worker // options.per_node for worker in range(options.workers)]
    links = TwoLevelLinks(options.bandwidth, options.inside, nodes if options.per_node > 1 else ())
    servers, hidden = options.servers, not options.exposed
    costs = Costs(profile, links, options.memory, servers=servers, hidden=hidden)
    print(describe(costs, partition(costs, options.workers)))


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
