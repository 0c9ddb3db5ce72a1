"""Commands that run on all ranks."""

import argparse
import faulthandler
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpi4py import MPI
from msgspec.structs import replace

from collectives import Communicator, LaunchError, UnknownAlgorithm, abort_on_exception
from collectives.commands import show_log
from collectives.extras import CheckedTransport
from collectives.files import check_regular
from mpitrain import data, extras
from mpitrain.checkpoint.changes import origin_of
from mpitrain.checkpoint.manifest import CheckpointError
from mpitrain.checkpoint.saving import checkpoints, resume
from mpitrain.commands.arguments import parse
from mpitrain.config import Config, ConfigError, Own, Server, Sync, load
from mpitrain.data import DataError
from mpitrain.metrics.trace import TRACE_FILE, Trace
from mpitrain.metrics.words import measured
from mpitrain.metrics.writer import ReportError
from mpitrain.optim.schedule_table import Factor
from mpitrain.parallel.precision import compute_type
from mpitrain.parallel.replicas import ReplicaMismatch
from mpitrain.ranks import shrink
from mpitrain.ranks.same import expect_same
from mpitrain.ranks.stop import GO_ON, Stopped, stop_flag
from mpitrain.ranks.threads import limit_blas_threads
from mpitrain.ranks.together import SharedError, all_or_nobody, by_rank_0, logged_once, together
from mpitrain.run import train as run_training
from mpitrain.start import start
from mpitrain.training import evaluation
from mpitrain.training.loop import Loop
from mpitrain.training.parts import NO_OBJECTS, UserObjects
from mpitrain.update.agreement import Diverged


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
            return extras.doctor(MPI.COMM_WORLD, options.folder)
        return complain(MPI.COMM_WORLD, error, 2)
    with whole as comm:
        show_log(options, comm.rank)
        with abort_on_exception(comm):
            try:
                with limit_blas_threads(comm), logged_once(comm), all_or_nobody(comm):
                    return _COMMANDS[options.command](comm, options)
            except (ConfigError, DataError, UnknownAlgorithm) as error:
                return complain(comm, error, 2)
            except (Diverged, ReplicaMismatch, CheckpointError, SharedError) as error:
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
        comm = Communicator(comm, transport=CheckedTransport.load())
    ranks, go_on = comm.size, options.resume
    traced = Path(config.run.dir) / TRACE_FILE
    while True:
        with stop_flag(options.grace, comm) as stop:
            trace = Trace(comm.rank, enabled=config.run.trace)
            try:
                loop = loop_of_job(comm, config, span=trace.span, stop=stop, go_on=go_on)
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


def loop_of_job(
    comm: Communicator,
    config: Config,
    schedule: Factor | None = None,
    settings: Mapping[str, Any] = {},
    **hooks: Any,
) -> Loop:
    """The loop of a job, with the objects that it names; a ``schedule`` replaces the job's."""
    given: dict[str, Any] = {"schedule": schedule} if schedule else {}
    if config.own != Own():
        given = together(comm, lambda: extras.brought(config.own), ConfigError) | given
    job, objects, _ = normalise(comm, config, given, settings)
    return start(comm, job, objects, **hooks)


def normalise(
    comm: Communicator, config: Config, given: Mapping[str, Any], settings: Mapping[str, Any]
) -> tuple[Config, UserObjects, Any]:
    """As :func:`mpitrain.normalise.normalise`, which a job of tables alone does not need."""
    if given or settings:
        return extras.normalise(comm, config, extras.Given(**given), settings)
    return config, NO_OBJECTS, None


def evaluate(comm: Communicator, options: argparse.Namespace) -> int:
    """Test the newest checkpoint of a job."""
    # A test needs no servers and no exchange of workers, however the model was trained.
    config = load_once(comm, options)
    # Clients that the program names are a part of the data; other splits go by the ranks.
    sync = Sync(split="own") if config.sync.split == "own" else Sync()
    config = replace(config, server=Server(), sync=sync)
    with loop_of_job(comm, config) as loop:
        # A test has no order of samples; that of workers with their own goes by their number.
        loop.parts.origin = origin_of(loop.parts)._replace(order="")
        found = resume(loop.parts, allow_changes=options.allow_changes)
        if found is None:
            raise CheckpointError(f"{checkpoints(config)} has no checkpoint; train first")
        result = evaluation.evaluate(loop.parts, 0)
        if comm.rank == 0:
            told = [f"checkpoint refused: {why}" for why in found.refused]
            for why in told + found.notes * options.allow_changes:
                print(why, file=sys.stderr)
            numbers = [measured(result.metrics), f"loss {result.test_loss:.6f}"]
            print(f"{found.path}: test {', '.join(filter(None, numbers))}")
    return 0


def profile(comm: Communicator, options: argparse.Namespace) -> int:
    """Measure a job's layers, on rank 0."""
    from mpitrain.device import choose
    from mpitrain.pipeline.profiles import measure, table, write_profile

    config = load_once(comm, options)
    device = choose(config, comm)

    def act() -> None:
        found = measure(config, options.repeats, device)
        try:
            write_profile(options.output, found)
        except OSError as error:
            raise ConfigError(f"--output {options.output}: {error.strerror}") from error
        print(table(found))
        print(f"written to {options.output}; parallel.partition = 'auto' uses it")

    by_rank_0(comm, act, ConfigError)
    return 0


#: Commands by name.
_COMMANDS: dict[str, Callable[..., int]] = {
    "train": train,
    "certify": extras.certify,
    "eval": evaluate,
    "find-lr": extras.find_lr,
    "profile": profile,
    "doctor": lambda comm, options: extras.doctor(comm, options.folder),
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
        if config.federated.clients and config.federated.secure:
            extras.check_keys()
    except ImportError as error:
        raise ConfigError(str(error)) from error
