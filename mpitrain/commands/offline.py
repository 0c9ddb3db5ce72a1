"""Commands that need no ranks."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from collectives.commands.arguments import above_zero, positive
from mpitrain.commands import methods as table
from mpitrain.commands import schedules, submitting
from mpitrain.commands.jobs import add_job
from mpitrain.config import ConfigError

if TYPE_CHECKING:
    from collectives.commands.arguments import Commands


def add(commands: "Commands") -> None:
    """Adds the commands."""
    for one in (
        _add_plan,
        _add_methods,
        _add_keys,
        schedules.add,
        _add_cut,
        _add_submit,
        _add_report,
        _add_compare,
        _add_examples,
        _add_init,
        _add_export,
    ):
        one(commands)


def run(options: argparse.Namespace) -> int:
    """Run one command; returns the exit code."""
    try:
        return int(options.act(options))
    except BrokenPipeError:
        raise
    except (ConfigError, ValueError, RuntimeError, OSError, ImportError) as error:
        message: Exception | str = error
        if isinstance(error, OSError) and error.filename:
            message = f"{error.filename}: {error.strerror}; name another file or folder"
        print(f"mpitrain: {message}", file=sys.stderr)
        return 2


def _add_plan(commands: "Commands") -> None:
    parser = commands.add_parser(
        "plan", help="print ranks, groups, stages, memory and predicted time before anything runs"
    )
    add_job(parser)
    parser.add_argument("-n", "--ranks", type=positive, required=True, help="number of ranks")
    parser.set_defaults(act=plan)


def plan(options: argparse.Namespace) -> int:
    """Print a layout before it runs."""
    from mpitrain.commands.plan import explain
    from mpitrain.config import load

    print(explain(load(options.config, options.set), options.ranks))
    return 0


def _add_cut(commands: "Commands") -> None:
    parser = commands.add_parser(
        "partition", help="cut a profile into replicated stages (PipeDream's dynamic program)"
    )
    parser.add_argument(
        "profile", type=Path, help="file of 'mpitrain profile', or PipeDream's text format"
    )
    parser.add_argument("-n", "--workers", type=positive, required=True, help="number of workers")
    parser.add_argument(
        "--bandwidth",
        type=above_zero,
        default=1.25e9,
        help="bandwidth of a link in bytes/s (1.25e9)",
    )
    parser.add_argument("--memory", type=above_zero, help="memory of a worker in bytes (no limit)")
    parser.set_defaults(act=cut)


def cut(options: argparse.Namespace) -> int:
    """Partition a profile."""
    from mpitrain.pipeline.partition import ClusterLinks, Costs, describe, partition
    from mpitrain.pipeline.profiles import read_profile

    costs = Costs(read_profile(options.profile), ClusterLinks(options.bandwidth), options.memory)
    print(describe(costs, partition(costs, options.workers)))
    return 0


def _add_report(commands: "Commands") -> None:
    parser = commands.add_parser(
        "report", help="write one HTML file of a run: how it ended, curves, whom ranks waited for"
    )
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.set_defaults(act=report)


def report(options: argparse.Namespace) -> int:
    """Write a run's report."""
    from mpitrain.report import write_report

    print(write_report(options.run))
    return 0


def _add_export(commands: "Commands") -> None:
    parser = commands.add_parser(
        "export", help="write a checkpoint's parameters as one safetensors file"
    )
    parser.add_argument("checkpoint", type=Path, help="folder of a checkpoint, or of a run")
    parser.add_argument("output", type=Path, help="file to write")
    parser.add_argument(
        "--torch",
        action="store_true",
        help="order the axes as torch does: (out, in), (out, in, rows, columns)",
    )
    parser.set_defaults(act=export)


def export(options: argparse.Namespace) -> int:
    """Write a checkpoint's parameters."""
    from mpitrain.checkpoint.export import export as write

    done = write(options.checkpoint, options.output, torch=options.torch)
    for why in done.refused:
        print(f"checkpoint refused: {why}", file=sys.stderr)
    print(f"{done.tensors} tensors of {done.folder} written to {options.output}")
    return 0


def _add_submit(commands: "Commands") -> None:
    parser = commands.add_parser("submit", help="submit a job to SLURM or PBS, or print its script")
    add_job(parser, needed=False)
    submitting.add(parser)
    parser.set_defaults(act=submit)


def submit(options: argparse.Namespace) -> int:
    """Submit a job, or print its script."""
    from mpitrain.commands.submitting import run as submitted

    print(submitted(options), end="" if options.dry_run else "\n")
    return 0


def _add_keys(commands: "Commands") -> None:
    parser = commands.add_parser(
        "keys", help="print the keys of a job file: defaults, values, meanings"
    )
    parser.add_argument("table", nargs="?", metavar="TABLE", help="one table, as optim (all)")
    parser.add_argument("--markdown", action="store_true", help="as docs/job.md has them")
    parser.set_defaults(act=keys)


def keys(options: argparse.Namespace) -> int:
    """Print the keys of a job file."""
    from mpitrain.commands.keys import keys as show

    show(options.table, as_markdown=options.markdown)
    return 0


def _add_examples(commands: "Commands") -> None:
    parser = commands.add_parser(
        "examples", help="list the example jobs that come with the package"
    )
    parser.set_defaults(act=examples)


def examples(options: argparse.Namespace) -> int:
    """List the example jobs."""
    from mpitrain.config import examples as packaged
    from mpitrain.config import load

    found = packaged.examples()
    for name, path in found.items():
        reads = Path(load(path).data.path).name
        print(f"{name:<17} {packaged.summary(path)}" + (f" Reads {reads}." if reads else ""))
    print(f"in {packaged.folder() / 'examples'}; --set data.path=FILE reads another text")
    return 0


def _add_init(commands: "Commands") -> None:
    parser = commands.add_parser("init", help="copy the example jobs and job scripts to a folder")
    parser.add_argument("folder", type=Path, metavar="DIR", help="where jobs/ is made")
    parser.set_defaults(act=init)


def init(options: argparse.Namespace) -> int:
    """Copy the examples and scripts."""
    from mpitrain.config import examples as packaged

    print(f"{packaged.copy(options.folder)} has the job scripts, and examples/ in it the jobs")
    return 0


def _add_compare(commands: "Commands") -> None:
    parser = commands.add_parser(
        "compare", help="show the runs of a folder in one table, best first"
    )
    parser.add_argument("runs", type=Path, help="a folder of runs, as jobs/sweep.sbatch makes it")
    parser.set_defaults(act=compare)


def compare(options: argparse.Namespace) -> int:
    """Print a table of runs."""
    from mpitrain.commands.compare import compare as table

    print(table(options.runs), end="")
    return 0


def _add_methods(commands: "Commands") -> None:
    parser = commands.add_parser(
        "methods",
        help="print which methods of training can be combined, and why others cannot",
        epilog="example: %(prog)s zero pipe",
    )
    table.add(parser)
    parser.set_defaults(act=table.methods)
