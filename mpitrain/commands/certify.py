"""``mpitrain certify``: layouts of a program beside one process that trains the whole batch."""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

from collectives.commands import add_verbose, positive, rank_count
from collectives.files import replace
from mpitrain.commands.arguments import add_job
from mpitrain.commands.search import file

if TYPE_CHECKING:
    from collectives import Communicator
    from collectives.commands import Commands


def add(commands: "Commands") -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "certify",
        allow_abbrev=False,  # --virtual is looked for before anything is parsed
        help="compare layouts of a job or a script with one process that trains the whole batch",
        description="Take the first steps in one process and in each layout on all ranks; compare "
        "samples, initial parameters, losses, gradients before clipping, parameters, and a run "
        "that goes on from a checkpoint.  CONFIG is a job file, an example or a script with an "
        "mpitrain.Trainer or for torch.distributed, whose arguments stand behind --.  Exit status: "
        "0 PASS, 3 FAIL, 4 ABSTAIN (no verdict can be found), 1 and 2 ERROR.",
        epilog="example: mpirun -n 4 %(prog)s train.py --layouts data=4 pipe=2,zero=2 -- --lr 0.1",
    )
    add_job(parser)
    add = parser.add_argument
    layouts = "keys of [parallel], or micro_batches, for each layout (the program's own)"
    add("--layouts", nargs="+", default=[], metavar="KEYS", help=layouts)
    add("--steps", type=positive, default=4, help="steps that are compared (4)")
    planted = "plant mistakes, too; where one passes, a certificate proves nothing"
    add("--mutate", action="store_true", help=planted)
    add("--json", type=file, metavar="FILE", help="file for the certificate")
    virtual = (
        "run N ranks as threads of this process, without a launcher; not for torch.distributed"
    )
    add("--virtual", type=rank_count, default=0, metavar="N", help=virtual)
    usual = {"topology": "flat", "alpha": 1.5, "bandwidth": 25.0, "slower": 1.0}
    parser.set_defaults(**usual, async_progress=False, costs=None)
    add_verbose(parser)


def run(comm: "Communicator", options: argparse.Namespace) -> int:
    """Certify on all ranks, and print the verdicts; returns the exit status."""
    from collectives.virtual import script
    from mpitrain import trainer
    from mpitrain.certify.certificate import Certifier
    from mpitrain.certify.compare import CODES, LEFT_OUT, Judgement
    from mpitrain.certify.loops import install
    from mpitrain.certify.record import MUTATIONS
    from mpitrain.config import ConfigError
    from mpitrain.ranks.together import by_rank_0

    rows = list[dict[str, str]]()

    def note(layout: str, mutation: str, found: Judgement) -> str:
        again = _again(options, comm.size if options.layouts else max(2, comm.size), layout)
        rows.append({"layout": layout, "mutation": mutation, **found._asdict(), "repeat": again})
        if comm.rank == 0:  # runs take long, and print nothing
            print("certify:", layout, mutation, found.verdict, file=sys.stderr, flush=True)
        return found.verdict

    layouts = {words: _tables(words) for words in options.layouts} or {"its own": {}}
    is_script = options.config.suffix == ".py"
    if is_script:
        if not options.config.is_file():
            raise ConfigError(f"there is no file {options.config}")
        if options.set:
            raise ConfigError("--set is for jobs; a script gets the words behind --")
        if find_spec("torch"):
            from mpitrain.certify.scripts import install as install_torch

            install_torch()
        install(trainer)
        program = script(options.config, *options.behind)
    else:
        program = _job(comm, options)
    with ExitStack() as stack:
        folder = by_rank_0(comm, lambda: _scratch(stack), OSError)
        if comm.rank == 0 or not options.virtual:  # threads have one output
            stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        sees_torch = is_script and not options.virtual  # a process has one group
        found = Certifier(comm, program, folder, options.steps, sees_torch=sees_torch)
        alone = Judgement("ABSTAIN", "", "one rank is the one process: nothing is compared")
        right = found.refer() if comm.size > 1 or options.layouts else alone
        if right.verdict != "PASS":
            note("one process", "", right)
            layouts = {}
        for words, tables in layouts.items():
            verdict = note(words, "", found.certify(tables))
            for mistake in MUTATIONS if options.mutate and verdict == "PASS" else ():
                note(words, mistake, found.certify(tables, mistake))
    missed = [r for r in rows if r["mutation"] and r["verdict"] not in ("FAIL", LEFT_OUT)]
    every = [row["verdict"] for row in rows if not row["mutation"]] + ["ABSTAIN"] * bool(missed)
    worst = max(every, key=list(CODES).index)

    def tell() -> None:
        print(f"{comm.size} ranks beside one process, in {found.numbers}")
        for row in rows:
            print("  ".join(filter(None, list(row.values())[:-1])))
        for row in rows:
            if not row["mutation"] and row["verdict"] != "PASS":
                print(f"again: {row['repeat']}")
        if missed:
            print("nothing is proved: a planted mistake ends otherwise than in a FAIL")
        print(worst)
        if options.json:
            told = {"verdict": worst, "ranks": comm.size, "numbers": found.numbers, "rows": rows}
            replace(options.json, json.dumps(told, indent=1) + "\n")

    by_rank_0(comm, tell, OSError, ConfigError)
    return CODES[worst]


def _scratch(stack: ExitStack) -> str:
    """A folder that is gone when ``stack`` closes, or this process ends, however it does."""
    folder = tempfile.mkdtemp(prefix=".certify-", dir=".")
    command = ["sh", "-c", 'cat; rm -rf "$0"', folder]
    watch = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    stack.callback(watch.communicate)
    return folder


def _tables(words: str) -> dict[str, Any]:
    """The tables of a layout."""
    from mpitrain.commands.beside import beside
    from mpitrain.config.reading import apply

    tables = dict[str, Any]()
    for override in beside(words, "--layouts"):
        apply(tables, override)
    return tables


def _job(comm: "Communicator", options: argparse.Namespace) -> Callable[[], None]:
    from mpi4py import MPI

    from mpitrain.certify.loops import install
    from mpitrain.commands import ranks
    from mpitrain.config import ConfigError

    if [word.removeprefix("--set=") for word in options.behind if word != "--set"] != (
        options.set_behind
    ):
        raise ConfigError("behind -- a job takes --set alone; other flags stand before it")
    options.set, options.behind = options.set + options.set_behind, ()
    config = ranks.load_once(comm, options)
    install(ranks)

    def program() -> None:
        loop = ranks.loop_of_job(cast(Any, MPI.COMM_WORLD), config)
        while loop.parts.steps_done < loop.parts.total_steps:
            list(loop.run_epoch(loop.parts.epoch))

    return program


def _again(options: argparse.Namespace, ranks: int, layout: str) -> str:
    """The command that certifies one layout."""
    start = [] if options.virtual else ["mpirun", "-n", str(ranks)]
    words = [*start, "mpitrain", "certify", str(options.config), "--steps", str(options.steps)]
    words += ["--virtual", str(ranks)] if options.virtual else []
    words += [word for one in options.set for word in ("--set", one)]
    words += ["--layouts", layout] if layout in options.layouts else []
    return shlex.join([*words, *(["--", *options.behind] if options.behind else [])])
