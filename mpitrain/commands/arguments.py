"""The command line, and the flags of commands that run on ranks."""

import argparse
import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from collectives.about import program
from collectives.commands.arguments import above_zero, not_negative, positive
from collectives.commands.program import add_commands, add_verbose, add_version, parsed
from mpitrain.commands import offline
from mpitrain.commands.offline import add_job

if TYPE_CHECKING:
    from collectives.commands.arguments import Commands

#: Commands that start MPI; the others run anywhere.
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
            train = parsed(_parser(), ["train", str(options.config), *behind])
            options.set_behind = train.set
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
    _add_train(commands)
    _add_trials(commands)
    _add_machine(commands)
    offline.add(commands)
    return parser


def _add_train(commands: "Commands") -> None:
    train = commands.add_parser(
        "train",
        help="train the model of a job file",
        description="Train the model of a job file (TOML) on all ranks, in the layout of its "
        "[parallel] table.  Each step is written to metrics.jsonl in the job's run.dir, "
        "checkpoints to checkpoints/ in it.  SIGTERM and SIGUSR1 stop training after a step, with "
        "a checkpoint and exit code 75.",
        epilog="example: mpirun -n 4 %(prog)s digits --set parallel.algorithm=ring",
    )
    add_job(train)
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


def _add_trials(commands: "Commands") -> None:
    evaluate = commands.add_parser(
        "eval", help="test the model of a run's newest checkpoint, on any number of ranks"
    )
    add_job(evaluate)
    add_verbose(evaluate)

    find = commands.add_parser(
        "find-lr",
        help="try learning rates in a short run, and suggest one",
        description="Train from the initial weights with a rate that grows from step to step, "
        "until the loss diverges; print the losses, and a rate to begin with (Smith 2017).  "
        "Nothing is written to run.dir.",
        epilog="example: mpirun -n 4 %(prog)s digits -o rates.png",
    )
    add_job(find)
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


def _add_machine(commands: "Commands") -> None:
    profile = commands.add_parser(
        "profile", help="measure each layer of a job's model: times, activations, parameters"
    )
    add_job(profile)
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
