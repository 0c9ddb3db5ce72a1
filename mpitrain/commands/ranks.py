"""Commands that run on all ranks."""

import argparse
import faulthandler
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace as replace_in
from pathlib import Path
from typing import Any

from mpi4py import MPI
from msgspec.structs import replace

from collectives import (
    CheckedTransport,
    CollectiveError,
    Communicator,
    LaunchError,
    UnknownAlgorithm,
    abort_on_exception,
)
from collectives.analysis import expect_picture
from collectives.commands import show_log
from collectives.files import check_regular
from mpitrain import data
from mpitrain.checkpoint import CheckpointError
from mpitrain.checkpoint.saving import checkpoints, resume
from mpitrain.commands import certify
from mpitrain.commands.arguments import parse
from mpitrain.config import Config, ConfigError, Server, Sync, expect, load
from mpitrain.config.own import brought
from mpitrain.data import DataError
from mpitrain.device import choose
from mpitrain.federated import RoundError
from mpitrain.federated.keys import check as check_keys
from mpitrain.metrics import tensorboard
from mpitrain.metrics.trace import TRACE_FILE, Trace
from mpitrain.metrics.words import measured
from mpitrain.metrics.writer import ReportError
from mpitrain.normalise import normalise
from mpitrain.optim.schedule_table import Factor
from mpitrain.parallel.replicas import ReplicaMismatch
from mpitrain.pipeline.draw import figure
from mpitrain.ranks import shrink
from mpitrain.ranks.same import expect_same
from mpitrain.ranks.stop import GO_ON, Stopped, stop_flag
from mpitrain.ranks.threads import limit_blas_threads
from mpitrain.ranks.together import all_or_nobody, by_rank_0, together
from mpitrain.run import train as run_training
from mpitrain.start import start
from mpitrain.step.agreement import NonFinite
from mpitrain.step.precision import compute_type
from mpitrain.training import evaluation
from mpitrain.training.loop import Loop
from mpitrain.user_objects import Given


def run(argv: Sequence[str]) -> int:
    """Run one command on all ranks; returns the exit code, also for errors that all ranks share.

    Any other error aborts all ranks, with the traceback of the rank that raised it.  A rank that a
    signal kills prints its stack first: SIGBUS, for example, comes from a mapped data file that was
    truncated.
    """
    faulthandler.enable()
    try:
        expect_same(MPI.COMM_WORLD, {"the command line": [_last(word) for word in argv]})
    except ConfigError as error:
        return complain(MPI.COMM_WORLD, error, 2)
    options = parse(argv, speak=MPI.COMM_WORLD.rank == 0)
    try:
        whole = Communicator(MPI.COMM_WORLD)
    except LaunchError as error:
        if options.command == "doctor":  # it reports the error in its own words
            return doctor(MPI.COMM_WORLD, options)
        return complain(MPI.COMM_WORLD, error, 2)
    with whole as comm:
        show_log(options, comm.rank)
        with abort_on_exception(comm):
            try:
                with limit_blas_threads(comm), all_or_nobody(comm):
                    return _COMMANDS[options.command](comm, options)
            except (ConfigError, DataError, UnknownAlgorithm) as error:
                return complain(comm, error, 2)
            except (NonFinite, ReplicaMismatch, CheckpointError, RoundError) as error:
                return complain(comm, error, 1)
            except Stopped:  # rank 0 has printed why
                return GO_ON
            except ReportError as error:  # on rank 0 alone: the others are in the next step
                raise SystemExit(f"mpitrain: {error}") from error


def _last(word: str) -> str:
    """A word of the command line without folders, which may differ between nodes."""
    key, is_setting, value = word.rpartition("=")
    return f"{key}{is_setting}{value.rpartition('/')[2]}"


def train(comm: Communicator, options: argparse.Namespace) -> int:
    """Train a job."""
    config = load_once(comm, options)
    by_rank_0(comm, lambda: mark_ended(options.ended, ended=False), ConfigError)
    if options.shrink:
        shrink.check(config)
        if comm.delays_messages:
            raise ConfigError(
                "--shrink has messages with checksums, which do not arrive late: leave it or "
                "COLLECTIVES_LINK out"
            )
        # Collectives in a node's shared memory would not notice that a rank died.
        comm = Communicator(comm, transport=CheckedTransport)
    ranks, go_on = comm.size, options.resume
    traced = Path(config.run.dir) / TRACE_FILE
    while True:
        with stop_flag(options.grace, comm) as stop:
            trace = Trace(comm.rank, enabled=config.run.trace)
            try:
                loop = _loop(comm, config, span=trace.span, stop=stop, go_on=go_on)
                parts = loop.parts
                try:
                    with loop, trace.to_file(parts.comm, traced, Stopped):
                        run_training(
                            loop,
                            go_on=go_on,
                            allow_changes=options.allow_changes,
                            resume_hint="train --resume",
                        )
                    break
                except MPI.Exception as error:
                    if not (options.shrink and shrink.is_death(error)):
                        raise
                    # A loop that was never made is not freed: its communicators are unknown.
                    comm = shrink.survivors(comm, parts.grid.comms)
            except (ConfigError, Stopped) as error:
                if comm.size == ranks:
                    raise
                why = Stopped(f"{ranks - comm.size} of {ranks} ranks died; {error}")
                shrink.leave(comm, complain(comm, why, GO_ON))
        if comm.rank == 0:
            text = f"{ranks - comm.size} of {ranks} ranks died; {comm.size} go on"
            print(f"mpitrain: {text} from the newest checkpoint", file=sys.stderr, flush=True)
        go_on = True
    by_rank_0(comm, lambda: mark_ended(options.ended, ended=True), ConfigError)
    if comm.size < ranks:
        shrink.leave(comm, 0)
    return 0


def mark_ended(path: Path | None, *, ended: bool) -> None:
    """Make the file of ``--ended``; at the beginning, remove an earlier run's.

    Raises:
        ConfigError: it cannot be made, or has something in it.
    """
    if path is None:
        return
    try:
        path.touch()
        check_regular(path)
        if path.stat().st_size:
            raise ConfigError(f"--ended {path}: there is something in it; name a new file")
        if not ended:
            path.unlink()
    except OSError as error:
        raise ConfigError(
            f"--ended {path}: {error.strerror}; name a file in a folder that is there"
        ) from error


def _loop(
    comm: Communicator,
    config: Config,
    schedule: Factor | None = None,
    settings: Mapping[str, Any] = {},
    **hooks: Any,
) -> Loop:
    """The loop of a job, with the objects that it names; a ``schedule`` replaces the job's."""
    own = Given(**together(comm, lambda: brought(config.own), ConfigError))
    given = replace_in(own, schedule=schedule) if schedule else own
    job, objects, _ = normalise(comm, config, given, settings)
    return start(comm, job, objects, **hooks)


def evaluate(comm: Communicator, options: argparse.Namespace) -> int:
    """Test the newest checkpoint of a job."""
    # A test needs no servers and no exchange of workers, however the model was trained.
    config = replace(load_once(comm, options), server=Server(), sync=Sync())
    with _loop(comm, config) as loop:
        found = resume(loop.parts)
        if found is None:
            raise CheckpointError(f"{checkpoints(config)} has no checkpoint; train first")
        result = evaluation.evaluate(loop.parts, 0)
        if comm.rank == 0:
            for why in found.refused:
                print(f"checkpoint refused: {why}", file=sys.stderr)
            told = [measured(result.metrics), f"loss {result.test_loss:.6f}"]
            print(f"{found.path}: test {', '.join(filter(None, told))}")
    return 0


def find_lr(comm: Communicator, options: argparse.Namespace) -> int:
    """Try learning rates."""
    from mpitrain.commands.find_lr import picture, table
    from mpitrain.training.find_lr import find

    config = load_once(comm, options)
    expect(config, "steps", command="mpitrain find-lr")

    def expect_output() -> None:  # fails now, rather than after the rates have been tried
        if options.output:
            try:
                figure()
                expect_picture(options.output)
            except (CollectiveError, ImportError) as error:
                raise ConfigError(f"--output: {error}") from error

    by_rank_0(comm, expect_output, ConfigError)
    limits = {"least": options.least, "most": options.most, "steps": options.steps}

    def make(comm: Communicator, job: Config, factor: Factor) -> Loop:
        # An optimiser of the program's own brings its rate, which would replace the job's.
        return _loop(comm, job, factor, {"optim": {"lr": job.optim.lr}})

    found = find(comm, config, make, **limits)

    def act() -> None:
        print(table(found))
        if options.output:
            try:
                picture(found, options.output)
            except (OSError, ValueError, ImportError) as error:
                raise ConfigError(f"--output {options.output}: {error}") from error
            print(f"drawn in {options.output}")

    by_rank_0(comm, act, ConfigError)
    return 0


def profile(comm: Communicator, options: argparse.Namespace) -> int:
    """Measure a job's layers, on rank 0."""
    from mpitrain.pipeline.profiles import measure, table, write_profile

    config = load_once(comm, options)
    device = choose(config, comm)

    def act() -> None:
        found = measure(config, device=device)
        try:
            write_profile(options.output, found)
        except OSError as error:
            raise ConfigError(f"--output {options.output}: {error.strerror}") from error
        print(table(found))
        print(f"written to {options.output}; parallel.partition = 'auto' uses it")

    by_rank_0(comm, act, ConfigError)
    return 0


def doctor(comm: MPI.Intracomm, options: argparse.Namespace) -> int:
    """Check the machine."""
    from mpitrain.doctor import doctor as examine

    return examine(comm, options.folder)


_COMMANDS = {
    "train": train,
    "certify": certify.run,
    "eval": evaluate,
    "find-lr": find_lr,
    "profile": profile,
    "doctor": doctor,
}


def complain(comm: MPI.Intracomm, error: BaseException, status: int) -> int:
    """Print an error that all ranks have raised, once; returns ``status``."""
    if comm.rank == 0:
        print(f"mpitrain: {error}", file=sys.stderr)
    return status


def load_once(comm: MPI.Intracomm, options: argparse.Namespace) -> Config:
    """Read the job on rank 0 alone, so that all ranks have the same job or the same error.

    Raises:
        ConfigError: on all ranks, for a job that cannot be or that needs a package which one of
            them lacks.
    """
    agreed = by_rank_0(comm, lambda: load(options.config, options.set), ConfigError)
    together(comm, lambda: _expect_packages(agreed), ConfigError)
    return agreed


def _expect_packages(config: Config) -> None:
    """Raise ConfigError, which says how to install it, if this rank lacks a package."""
    try:
        if not config.own.data:
            data.check(config.data)
        compute_type(config.run.compute, config.run.dtype)
        if config.run.tensorboard:
            tensorboard.check()
        if config.federated.clients and config.federated.secure:
            check_keys()
    except ImportError as error:
        raise ConfigError(str(error)) from error
