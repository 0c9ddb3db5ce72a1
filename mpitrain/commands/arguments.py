"""The command line, and the flags of commands that run on ranks."""

import argparse
import io
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from collectives.about import program
from collectives.commands import (
    above_zero,
    add_commands,
    add_verbose,
    add_version,
    add_virtual,
    not_negative,
    parsed,
    positive,
    rank_count,
)
from mpitrain import extras
from mpitrain.ranks import GRACE_S

if TYPE_CHECKING:
    from collectives.commands import Commands

#: Commands that start MPI; the others run anywhere.
RANKS = ("train", "certify", "eval", "find-lr", "profile", "doctor")


def command_of(argv: Sequence[str]) -> str:
    """The first word that is no flag; empty: there is none."""
    return next((word for word in argv if not word.startswith("-")), "")


def needs_ranks(argv: Sequence[str]) -> bool:
    """Whether a command runs on the ranks of an MPI launcher."""
    return command_of(argv) in RANKS


def parse(argv: Sequence[str], *, speak: bool = True) -> argparse.Namespace:
    """The options; only the rank that may ``speak`` prints help and complaints."""
    unheard = io.StringIO()
    with (
        redirect_stdout(sys.stdout if speak else unheard),
        redirect_stderr(sys.stderr if speak else unheard),
    ):
        words, behind = _cut(argv)
        options = parsed(_parser(command_of(words)), words)
        options.behind, options.set_behind = behind, []
        if options.command in ("train", "scale") and not options.virtual:
            _expect_no_model(options)
        if behind and options.config is not None and options.config.suffix != ".py":
            train = parsed(_parser("train"), ["train", str(options.config), *behind])
            options.set_behind = train.set
        return options


def _expect_no_model(options: argparse.Namespace) -> None:
    """End the program where real ranks were given what only virtual ones read."""
    parser = _parser(options.command)
    usual = parsed(parser, [options.command, str(options.config)])
    for key in ("costs", "topology", "slower", "async_progress", "alpha", "bandwidth"):
        if getattr(options, key) != getattr(usual, key):
            word = key.replace("_", "-")
            virtual = "--virtual N" if options.command == "train" else "--virtual"
            parser.error(f"--{word} is for virtual ranks; add {virtual}, or leave it out")


def _cut(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The words of a command that takes programs, and what stands behind ``--``, the program's."""
    if "--" not in argv or command_of(argv) not in ("submit", "certify"):
        return argv, ()
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def _parser(command: str) -> argparse.ArgumentParser:
    """The parser of one command that runs on ranks, or of all commands."""
    parser = argparse.ArgumentParser(
        prog=program("mpitrain"),
        description=f"Distributed training on MPI.  Start {', '.join(RANKS[:-1])} and {RANKS[-1]} "
        "with mpirun or srun, one process a rank; without a launcher they run as a single rank.  "
        "The other commands need no ranks.",
    )
    add_version(parser)
    add_verbose(parser)
    commands = add_commands(parser, dest="command")
    every: tuple[Callable[..., object], ...]
    every = (_add_train, extras.add_certify, _add_trials, _add_trials, _add_machine, _add_machine)
    own = dict(zip(RANKS, every, strict=True))
    for add in [own[command]] if command in own else dict.fromkeys((*every, extras.add_offline)):
        add(commands)
    return parser


def add_job(parser: argparse.ArgumentParser, *, needed: bool = True) -> None:
    """Adds ``CONFIG`` and ``--set``, the arguments of commands that read a job."""
    words = "the job file, or the name of an example (see the command examples)"
    number = None if needed else "?"
    parser.add_argument("config", type=Path, nargs=number, metavar="CONFIG", help=words)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="TABLE.KEY=VALUE",
        help="replace a value of the job file, as in optim.lr=0.1 or model.hidden=[128,64]; may "
        "be given several times",
    )


def _add_train(commands: "Commands") -> None:
    train = commands.add_parser(
        "train",
        allow_abbrev=False,  # --virtual is looked for before anything is parsed
        help="train the model of a job file",
        description="Train the model of a job file (TOML) on all ranks, in the layout of its "
        "[parallel] table.  Each step is written to metrics.jsonl in the job's run.dir, "
        "checkpoints to checkpoints/ in it.  SIGTERM, SIGUSR1 and SIGINT stop training after "
        "a step, with a checkpoint and exit code 75.",
        epilog="example: mpirun -n 4 %(prog)s digits --set parallel.algorithm=ring",
    )
    add_job(train)
    add = train.add_argument
    goes_on = (
        "continue from the newest complete checkpoint, on this or another layout; without one, "
        "start from the beginning"
    )
    add("--resume", action="store_true", help=goes_on)
    changed = (
        "with --resume, go on although the job's loss, data, frozen parameters or the like have "
        "changed; the checkpoint must still fit the model"
    )
    add("--allow-changes", action="store_true", help=changed)
    grace = "stop this many seconds before SLURM's time limit, or half of it (120)"
    add("--grace", type=not_negative, default=GRACE_S, metavar="SECONDS", help=grace)
    ended = (
        "create FILE only when training completes, and remove an earlier one first; some launchers "
        "exit 0 for a job that died"
    )
    add("--ended", type=Path, metavar="FILE", help=ended)
    left = (
        "experimental: when ranks die, continue from the newest checkpoint on the remaining ranks, "
        "if the job's layout fits them; needs Open MPI's mpirun --with-ft ulfm"
    )
    add("--shrink", action="store_true", help=left)
    virtual = (
        "run N ranks as threads of this process, without a launcher; times are those of a "
        "modelled network"
    )
    add("--virtual", type=rank_count, default=0, metavar="N", help=virtual)
    add_virtual(train)
    add_costs(train)
    add_verbose(train)


def add_costs(parser: argparse.ArgumentParser) -> None:
    """Adds the profile whose times virtual ranks take."""
    costs = "take the layers' times from a file of 'mpitrain profile' (measured CPU time)"
    parser.add_argument("--costs", type=Path, metavar="FILE", help=costs)


def _add_trials(commands: "Commands") -> None:
    tested = "test the model of a run's newest checkpoint, on any number of ranks"
    evaluate = commands.add_parser("eval", help=tested)
    add_job(evaluate)
    changed = "test although the job's loss, data or the like are not those of training"
    evaluate.add_argument("--allow-changes", action="store_true", help=changed)
    add_verbose(evaluate)

    find = commands.add_parser(
        "find-lr",
        help="try learning rates in a short run, and suggest one",
        description="Train from the initial weights with a rate that grows from step to step, "
        "until the loss diverges; print the losses, and a rate to begin with (Smith 2017).  "
        "Nothing is written to run.dir.",
        epilog="example: mpirun -n 4 %(prog)s digits",
    )
    add_job(find)
    add = find.add_argument
    add("--least", type=above_zero, default=1e-6, metavar="LR", help="the first optim.lr (1e-6)")
    add("--most", type=above_zero, default=10.0, metavar="LR", help="the last optim.lr (10)")
    add("--steps", type=positive, default=100, help="steps from the first to the last (100)")
    add_verbose(find)


def _add_machine(commands: "Commands") -> None:
    measured = "measure each layer of a job's model: times, activations, parameters"
    profile = commands.add_parser("profile", help=measured)
    add_job(profile)
    file = Path("profile.json")
    profile.add_argument("-o", "--output", type=Path, default=file, help=f"file to write ({file})")
    often = "passes of each layer, the fastest of which counts (5)"
    profile.add_argument("--repeats", type=positive, default=5, metavar="N", help=often)
    add_verbose(profile)

    doctor = commands.add_parser("doctor", help="check this machine or allocation for training")
    folder = "folder of checkpoints (runs)"
    doctor.add_argument("folder", type=Path, nargs="?", default=Path("runs"), help=folder)
    add_verbose(doctor)
