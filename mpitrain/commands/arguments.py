"""What the command line may say."""

import argparse
import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from collectives.about import program
from collectives.commands.arguments import above_zero, not_negative, positive
from collectives.commands.program import add_commands, add_verbose, add_version, parsed
from mpitrain.commands import submitting
from mpitrain.pipeline.schedules import SCHEDULES

#: These start MPI; the others run anywhere.
RANKS = ("train", "eval", "find-lr", "profile", "doctor")


def needs_ranks(argv: Sequence[str]) -> bool:
    """Whether a command runs on the ranks of an MPI launcher."""
    return next((word for word in argv if not word.startswith("-")), "") in RANKS


def parse(argv: Sequence[str], *, speak: bool = True) -> argparse.Namespace:
    """The options; only the rank that may ``speak`` prints help and complaints."""
    unheard = io.StringIO()
    with (
        redirect_stdout(sys.stdout if speak else unheard),
        redirect_stderr(sys.stderr if speak else unheard),
    ):
        words, behind = _cut(argv)
        options = parsed(_parser(), words)
        options.behind, options.set_behind = behind, []
        if behind and options.config is not None and options.config.suffix != ".py":
            told = parsed(_parser(), ["train", str(options.config), *behind])
            options.set_behind = told.set
        return options


def _cut(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The words of ``submit``, and what stands behind ``--``, which is the program's."""
    if "--" not in argv or next((w for w in argv if not w.startswith("-")), "") != "submit":
        return argv, ()
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program("mpitrain"),
        description="Distributed training on MPI.  Start train, eval, find-lr, profile and doctor "
        "with mpirun or srun, one process a rank; without a launcher they run as a single rank.  "
        "The other commands need no ranks.",
    )
    add_version(parser)
    add_verbose(parser)
    commands = add_commands(parser, dest="command")

    train = commands.add_parser(
        "train",
        help="train the model of a job file",
        description="Train the model of a job file (TOML) on all ranks, in the layout of its "
        "[parallel] table.  Each step is written to metrics.jsonl in the job's run.dir, "
        "checkpoints to checkpoints/ in it.  SIGTERM and SIGUSR1 stop training after a step, with "
        "a checkpoint and exit code 75.",
        epilog="example: mpirun -n 4 %(prog)s digits --set parallel.algorithm=ring",
    )
    _job(train)
    train.add_argument(
        "--resume",
        action="store_true",
        help="continue from the newest complete checkpoint, on this or another layout; without "
        "one, start from the beginning",
    )
    train.add_argument(
        "--allow-changes",
        action="store_true",
        help="with --resume, go on although the job has changed in what decides on its numbers, as "
        "its loss, frozen parameters or data, as far as the checkpoint fits it",
    )
    train.add_argument(
        "--grace",
        type=not_negative,
        default=120.0,
        metavar="SECONDS",
        help="stop this many seconds before SLURM's time limit (120)",
    )

    train.add_argument(
        "--ended",
        type=Path,
        metavar="FILE",
        help="create FILE only when training completes; some launchers exit 0 for a job that died",
    )
    train.add_argument(
        "--replay",
        type=Path,
        metavar="RUN",
        help="serve pulls and pushes in the order that the servers of the run in folder RUN have "
        "logged, which gives the same bits (jobs with servers; as server.replay)",
    )
    train.add_argument(
        "--shrink",
        action="store_true",
        help="experimental: when ranks die, continue from the newest checkpoint on the remaining "
        "ranks, if the job's layout fits them; needs Open MPI's mpirun --with-ft ulfm",
    )
    add_verbose(train)

    evaluate = commands.add_parser(
        "eval", help="test the model of a run's newest checkpoint, on any number of ranks"
    )
    _job(evaluate)
    add_verbose(evaluate)

    find = commands.add_parser(
        "find-lr",
        help="try learning rates in a short run, and suggest one",
        description="Train from the initial weights with a rate that grows from step to step, "
        "until the loss diverges; print the losses, and a rate to begin with (Smith 2017).  "
        "Nothing is written to run.dir.",
        epilog="example: mpirun -n 4 %(prog)s digits -o rates.png",
    )
    _job(find)
    find.add_argument(
        "--least", type=above_zero, default=1e-6, metavar="LR", help="the first optim.lr (1e-6)"
    )
    find.add_argument(
        "--most", type=above_zero, default=10.0, metavar="LR", help="the last optim.lr (10)"
    )
    find.add_argument(
        "--steps", type=positive, default=100, help="steps from the first to the last (100)"
    )
    find.add_argument("-o", "--output", type=Path, help="picture to draw, PNG or SVG (none)")
    add_verbose(find)

    profile = commands.add_parser(
        "profile", help="measure each layer of a job's model: times, activations, parameters"
    )
    _job(profile)
    profile.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("profile.json"),
        help="file to write (profile.json)",
    )
    add_verbose(profile)

    doctor = commands.add_parser("doctor", help="check this machine or allocation for training")
    doctor.add_argument(
        "folder", type=Path, nargs="?", default=Path("runs"), help="folder of checkpoints (runs)"
    )
    add_verbose(doctor)

    plan = commands.add_parser(
        "plan",
        help="print ranks, groups, stages, memory and predicted time before anything runs",
    )
    _job(plan)
    plan.add_argument("-n", "--ranks", type=positive, required=True, help="number of ranks")

    schedules = commands.add_parser("schedules", help="prove, time and draw pipeline schedules")
    schedules.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SCHEDULES))
    schedules.add_argument("-p", "--stages", type=positive, default=4, help="stages (4)")
    schedules.add_argument(
        "-m", "--micro-batches", type=positive, default=8, help="micro-batches of each replica (8)"
    )
    schedules.add_argument("--chunks", type=positive, default=2, help="chunks of interleaved (2)")
    schedules.add_argument(
        "--times",
        type=above_zero,
        nargs=3,
        default=(1.0, 1.0, 1.0),
        metavar="T",
        help="times of a forward pass and of the two halves of a backward pass (1 1 1)",
    )
    schedules.add_argument("-o", "--output", type=Path, help="folder for pictures")
    schedules.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page that steps through them in time"
    )

    cut = commands.add_parser(
        "partition", help="cut a profile into replicated stages (PipeDream's dynamic program)"
    )
    cut.add_argument(
        "profile", type=Path, help="file of 'mpitrain profile', or PipeDream's text format"
    )
    cut.add_argument("-n", "--workers", type=positive, required=True, help="number of workers")
    cut.add_argument(
        "--bandwidth",
        type=above_zero,
        default=1.25e9,
        help="bandwidth of a link in bytes/s (1.25e9)",
    )
    cut.add_argument("--memory", type=above_zero, help="memory of a worker in bytes (no limit)")

    about = "write one HTML file of a run: how it ended, curves, whom ranks waited for"
    report = commands.add_parser("report", help=about)
    report.add_argument("run", type=Path, help="the run's folder")

    submit = commands.add_parser("submit", help="submit a job to SLURM or PBS, or print its script")
    _job(submit, needed=False)
    submitting.add(submit)

    keys = commands.add_parser(
        "keys", help="print the keys of a job file: defaults, values, meanings"
    )
    keys.add_argument("table", nargs="?", metavar="TABLE", help="one table, as optim (all)")
    keys.add_argument("--markdown", action="store_true", help="as docs/job.md has them")

    commands.add_parser("examples", help="list the example jobs that come with the package")

    init = commands.add_parser("init", help="copy the example jobs and job scripts to a folder")
    init.add_argument("folder", type=Path, metavar="DIR", help="where jobs/ is made")

    compare = commands.add_parser(
        "compare", help="show the runs of a folder in one table, best first"
    )
    compare.add_argument("runs", type=Path, help="a folder of runs, as jobs/sweep.sbatch makes it")

    export = commands.add_parser(
        "export", help="write a checkpoint's parameters as one safetensors file"
    )
    export.add_argument("checkpoint", type=Path, help="folder of a checkpoint, or of a run")
    export.add_argument("output", type=Path, help="file to write")
    export.add_argument(
        "--torch",
        action="store_true",
        help="order the axes as torch does: (out, in), (out, in, rows, columns)",
    )
    return parser


def _job(parser: argparse.ArgumentParser, *, needed: bool = True) -> None:
    told = "the job file, or the name of an example (see the command examples)"
    number = None if needed else "?"
    parser.add_argument("config", type=Path, nargs=number, metavar="CONFIG", help=told)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="TABLE.KEY=VALUE",
        help="replace a value of the job file, as in optim.lr=0.1 or model.hidden=[128,64]; may "
        "be given several times",
    )
