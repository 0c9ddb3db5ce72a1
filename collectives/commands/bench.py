"""``mpirun -n 4 collectives bench allreduce``: flags and columns as of nccl-tests."""

import argparse
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from collectives.about import load_mpi
from collectives.algorithms import find, names, parse
from collectives.analysis.pictures import expect_picture, pyplot
from collectives.bench import inputs
from collectives.commands.arguments import (
    NETWORKS,
    above_zero,
    add_sizes,
    collective,
    count,
    known,
    not_negative,
    positive,
    rate,
    size,
    split,
)
from collectives.commands.program import Commands, add_verbose, refuse, show_log
from collectives.contracts import CONTRACTS
from collectives.errors import CollectiveError, InvalidBuffer, UnknownAlgorithm
from collectives.execution.memory import OPERATIONS
from collectives.files import is_stream

if TYPE_CHECKING:
    from collectives.bench.measure import Result
    from collectives.communicator import Communicator

#: Kinds of memory that --memory names.
_MEMORY = {
    "numpy": ["numpy"],
    "shared": ["shared"],
    "both": ["numpy", "shared"],
    "cupy": ["cupy"],
    "ipc": ["ipc"],
}
#: Collectives by their v-variants.
_VECTORS = {f"{name}v": name for name, one in CONTRACTS.items() if one.block and not one.reduces}
#: Tests between pairs of ranks.
_PAIRS = ("latency", "bandwidth", "bibandwidth", "multipair")
#: OSU's names of tests, where ours differ.
_OSU_NAMES = {"bw": "bandwidth", "bibw": "bibandwidth", "mbw_mr": "multipair"}


def add(commands: Commands) -> None:
    """Adds ``bench``."""
    parser = commands.add_parser("bench", help="measure under mpirun, beside the MPI library")
    told = (
        f"{', '.join(CONTRACTS)}; v-variants, as alltoallv, here with equal blocks; between pairs "
        f"of ranks {', '.join(_PAIRS)}; also OSU's names, as osu_bcast"
    )
    parser.add_argument("collective", type=_measured, help=told)
    _add_flags(parser.add_argument_group)
    add_verbose(parser)
    parser.set_defaults(run=run)


def _measured(text: str) -> str:
    """A collective, a v-variant or a test between pairs, by our name or OSU's."""
    name = text.removeprefix("osu_")
    name = _OSU_NAMES.get(name, name)
    return name if name in (*_PAIRS, *_VECTORS) else collective(name)


def _add_flags(group: Callable[[str], argparse._ArgumentGroup]) -> None:
    add = group("what is measured").add_argument
    listed = "names with options, mine.py:name, auto, native, nccl (on a GPU); default: all of ours"
    add("--algorithm", default="all", metavar="A,B", help=listed)
    add("-o", "--op", choices=OPERATIONS, default="sum", help="reduction, as in nccl-tests (sum)")
    add("-d", "--datatype", default="float", help="NumPy's or nccl-tests' name (float)")
    place = "run out of place, in place, or both (out)"
    add("--place", choices=("out", "in", "both"), default="out", help=place)
    memory = (
        "arrays: numpy: ordinary ones; shared: of Communicator.empty; both: these two; cupy: on "
        "the GPU; ipc: on the GPU, shared with the other ranks (numpy)"
    )
    add("--memory", choices=_MEMORY, default="numpy", help=memory)
    kinds = (
        "rewritten: each rank writes to its buffers before each call, from 16 KiB on; cached: the "
        "same buffers in every call, as other benchmarks have them; rotating: up to 64 sets of "
        "buffers in turn, of which large ones do not stay in the caches (rewritten)"
    )
    add("--buffers", choices=("rewritten", "cached", "rotating"), default="rewritten", help=kinds)
    level = "thread level to ask MPI for (multiple)"
    add("--thread-level", choices=("single", "multiple"), help=level)
    add = group("sizes").add_argument
    add_sizes(add, "1M", 4)
    add("-i", "--stepbytes", type=size, help="add this many bytes to each size instead")
    add = group("repeats and checks").add_argument
    add("-n", "--iters", type=positive, help="calls in a repeat, as nccl-tests' (20 ms of them)")
    before = "calls before a repeat's timed ones (1)"
    add("-w", "--warmup_iters", type=count, default=1, help=before)
    add("--repeats", type=positive, default=7, help="repeats; the median is printed (7)")
    checked = "check results bit by bit: 1 yes, 0 no (1)"
    add("-c", "--check", type=int, choices=(0, 1), default=1, help=checked)
    average = "combine the ranks' times: 0 rank 0, 1 mean, 2 min, 3 max (3)"
    add("-a", "--average", type=int, choices=(0, 1, 2, 3), default=3, help=average)
    floor = "print the least time that memory bandwidth (STREAM) allows, as a share of the measured"
    add("--floor", action="store_true", help=floor)
    peak = (
        "bandwidth of a link in one direction, as 25GB/s or 200Gb/s, or a network: "
        f"{', '.join(NETWORKS)}; print the share of it that the bus bandwidth is"
    )
    add("--peak", type=rate, metavar="RATE", help=peak)
    hidden = (
        "compute during nonblocking calls, with K calls of Test; print which share of their time "
        "is hidden"
    )
    add("--overlap", type=positive, metavar="K", help=hidden)
    add("-T", "--timeout", type=above_zero, help="abort the job after this many seconds")
    add = group("output").add_argument
    add("--format", choices=("table", "osu"), default="table", help="columns (table)")
    add("-J", "--output_file", type=Path, help="write JSON")
    add("--csv", type=Path, help="write CSV")
    add("--plot", type=Path, help="write a PNG")
    judged = (
        "exit with 1 if the mean bus bandwidth of all our rows, or of native's without these, is "
        "below this, in GB/s"
    )
    add("--min-busbw", type=not_negative, default=0, help=judged)


def algorithms(collective: str, text: str, size: int, uneven: bool = False) -> list[str]:
    """Known names of ``--algorithm``, with native; algorithms of files and packages are proved and
    registered; all are those for ``size`` ranks, with ``uneven`` those that take unequal blocks."""
    every = names(collective, size if "all" in split(text) else None)  # trees take long to pack
    usual = [n for n in every if not uneven or find(collective, n).uneven]
    wanted = known(text, usual)
    for name in wanted.values():
        if name not in ("auto", "native", "nccl"):
            find(collective, parse(name)[0])
    return [*wanted] if "native" in wanted else [*wanted, "native"]


def run(options: argparse.Namespace) -> int:
    """Measures and reports; the exit status is 1 for wrong results or too little bandwidth."""
    if options.thread_level:
        import mpi4py

        mpi4py.rc.thread_level = options.thread_level
    load_mpi()
    from mpi4py import MPI

    from collectives.communicator import Communicator
    from collectives.failure.abort import abort_on_exception

    comm = Communicator(MPI.COMM_WORLD)
    show_log(options, comm.rank)
    with abort_on_exception(comm), _deadline(comm, options.timeout):
        return _measure(comm, options)


def _measure(comm: "Communicator", options: argparse.Namespace) -> int:
    from collectives.bench import report
    from collectives.bench.device import check_device_messages, check_nccl, use_own_gpu
    from collectives.bench.measure import FLOORS, Case, measure
    from collectives.bench.point_to_point import measure_pairs

    try:
        pairs = options.collective in _PAIRS
        plain = _VECTORS.get(options.collective, options.collective)
        uneven = plain != options.collective
        wanted = ["native"] if pairs else algorithms(plain, options.algorithm, comm.size, uneven)
        on_device = options.memory in ("cupy", "ipc")
        _check_memory(comm, options.memory, wanted)
        if options.place == "in" and not pairs and CONTRACTS[plain].in_place is None:
            raise ValueError(
                f"{options.collective} is measured out of place only, as its input does not fit "
                "where its result goes; use --place out"
            )
        if pairs and comm.size == 1:
            raise ValueError(
                f"{options.collective} is measured between pairs of ranks; start it as mpirun -n 2 "
                f"python -m collectives bench {options.collective}"
            )
        _check_outputs(comm, options)
        dtype = inputs.parse_dtype(options.datatype)
        ends = options.minbytes, options.maxbytes
        lengths = list(inputs.sizes(*ends, options.stepfactor, options.stepbytes))
        if plain == "barrier":  # which has no size
            lengths = lengths[:1]
        about = report.environment(comm)
        if on_device:
            about["gpu"] = use_own_gpu(comm)
            if "nccl" in wanted:
                check_nccl(comm)
            if pairs:
                check_device_messages(comm)
    except (CollectiveError, ValueError) as error:  # raised on all ranks
        return refuse(comm.rank, error)

    def say(text: str) -> None:
        if comm.rank == 0 and options.format == "table":
            print(text, flush=True)

    say(report.header(about, report.command_line()))
    width = max(26, 2 + max(map(len, wanted)))
    say(report.columns(width, options.peak))
    results: list[Result] = []
    places = {"out": [False], "in": [True], "both": [False, True]}
    for nbytes in lengths:
        for memory, in_place in product(_MEMORY[options.memory], places[options.place]):
            case = Case(
                collective=plain,
                vector=uneven,
                nbytes=nbytes,
                dtype=dtype,
                op=options.op,
                algorithms=wanted,
                in_place=in_place,
                memory=memory,
                iters=options.iters,
                warmup=options.warmup_iters,
                repeats=options.repeats,
                check=bool(options.check),
                average=options.average,
                rewritten=options.buffers == "rewritten",
                rotating=report.beyond_caches() if options.buffers == "rotating" else 0,
                tests=options.overlap,
                floor=options.floor and not on_device and plain in FLOORS,
            )
            try:
                measured = measure_pairs(comm, case) if pairs else measure(comm, case)
            except (UnknownAlgorithm, InvalidBuffer) as error:  # on all ranks
                return refuse(comm.rank, error)
            native = next((r for r in measured if r.algorithm == "native"), None)
            for result in measured:
                say(report.row(result, native, width, options.peak))
            results += measured
        # A job that is killed has what it has measured.
        if why := report.unwritten(comm, partial(_write, options, results, about, False)):
            return refuse(comm.rank, why)
    try:
        report.expect_some(results)
    except CollectiveError as error:  # on all ranks
        return refuse(comm.rank, error)
    say(report.footer(results, options.min_busbw))
    if why := report.unwritten(comm, partial(_write, options, results, about, True)):
        return refuse(comm.rank, why)
    wrong = any(result.wrong for result in results)
    return int(wrong or report.average_busbw(results) < options.min_busbw)


def _check_memory(comm: "Communicator", memory: str, wanted: list[str]) -> None:
    """Raises ValueError, on all ranks, if no arrays in ``memory`` are what was asked for."""
    if "nccl" in wanted and memory not in ("cupy", "ipc"):
        raise ValueError("nccl needs --memory cupy or ipc")
    is_apart = comm.nodes > 1 or comm.checks_messages or comm.delays_messages
    if is_apart and memory in ("shared", "both", "ipc"):
        raise ValueError(
            "ranks of several nodes, and messages with checksums or delays, share no memory; use "
            "--memory numpy or cupy"
        )


def _check_outputs(comm: "Communicator", options: argparse.Namespace) -> None:
    """Raises CollectiveError, on all ranks and before measuring, if rank 0 cannot write a file."""
    from collectives.bench import report

    def check() -> None:
        for path in (options.output_file, options.csv):
            if path and (path.is_dir() or not path.parent.is_dir()):
                raise CollectiveError(
                    f"cannot write {path}: it is a folder, or its folder does not exist"
                )
        if options.plot:
            pyplot()
            expect_picture(options.plot)

    if why := report.unwritten(comm, check):
        raise CollectiveError(why)


def _write(
    options: argparse.Namespace, results: "list[Result]", about: dict, is_over: bool
) -> None:
    """Writes the results to files, which are replaced, and at the end to streams and a picture."""
    from collectives.bench import report
    from collectives.bench.osu import osu

    if is_over and options.format == "osu":
        print(osu(results))
    config = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
        if not callable(value)
    }
    if options.output_file and (is_over or not is_stream(options.output_file)):
        report.write_json(options.output_file, results, about, config)
    if results and options.csv and (is_over or not is_stream(options.csv)):
        report.write_csv(options.csv, results)
    if is_over and options.plot:
        report.plot(options.plot, results, about)


@contextmanager
def _deadline(comm: "Communicator", seconds: float | None) -> Iterator[None]:
    """Aborts the job after ``seconds`` by a thread, as the main one may hang inside MPI."""
    if seconds is None:
        yield
        return

    def expired() -> None:
        print(
            f"collectives: rank {comm.rank}: not done after {seconds:g} s (--timeout)",
            file=sys.stderr,
        )
        sys.stderr.flush()
        comm.Abort(124)
        os._exit(124)

    timer = threading.Timer(seconds, expired)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
