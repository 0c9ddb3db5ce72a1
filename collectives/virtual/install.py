"""Puts a virtual cluster in the place of MPI, and of the clock, in this process."""

import builtins
import gc
import importlib
import os
import sys
import time
from collections.abc import Callable
from math import inf
from types import ModuleType
from typing import Any, NoReturn

import mpi4py

from collectives import extras
from collectives.virtual.rank import HERE, here


def install() -> None:
    """From now on ``mpi4py.MPI`` is a virtual cluster's, and the clock of a thread that is a rank
    is the rank's.

    Call it before anything is imported that uses MPI.  There is no way back in this process.

    Raises:
        RuntimeError: the communicator was imported before, with the MPI library's.
    """
    if "collectives.communicator" in sys.modules:
        raise RuntimeError("MPI is in use in this process; start a virtual cluster in a new one")
    for name in ("COLLECTIVES_LINK", "COLLECTIVES_CHECKSUMS"):  # of real messages
        os.environ.pop(name, None)
    os.environ["COLLECTIVES_TIMEOUT"] = "0"  # no watchdog: who waits for ever is known exactly
    from mpi4py import MPI as library

    from collectives.virtual import mpi

    module = ModuleType("mpi4py.MPI")
    vars(module).update(vars(library))
    vars(module).update(mpi.NAMES)
    sys.modules["mpi4py.MPI"] = module
    mpi4py.MPI = module
    if hasattr(os, "sched_setaffinity"):  # on one core, its noise is no single rank's
        core = max(os.sched_getaffinity(0), key=lambda core: hash((core, os.getpid())))
        os.sched_setaffinity(0, {core})
    _replace_clock()
    _leave_out_the_process()

    from collectives.execution import waiting

    waiting.give_way = lambda: here().idle()
    waiting.NOTE_S = inf
    from collectives.calls import mpi4py_spec

    mpi4py_spec.MPI = library  # which packs items with gaps
    from collectives.communicator import Communicator
    from collectives.execution.transport import mpi as transport
    from collectives.failure import abort

    abort._abort = lambda comm, status: end_process(status)
    # Native collectives become ours, which go by messages; objects take their time, too, so that
    # nothing need be refused.
    transport.MPITransport.delays = True
    transport.LongMessage = lambda request: request  # type: ignore[assignment, misc]
    Communicator.delays_messages = property(lambda self: False)  # type: ignore[assignment, method-assign]


def _replace_clock() -> None:
    """A thread that is a rank sees its rank's clock, and sleeps on it."""

    def clock(of: Callable[[], float]) -> Callable[[], float]:
        return lambda: of() if (rank := getattr(HERE, "rank", None)) is None else rank.read()

    time.perf_counter, time.monotonic = clock(time.perf_counter), clock(time.monotonic)
    time.perf_counter_ns = lambda: round(1e9 * time.perf_counter())
    time.monotonic_ns = lambda: round(1e9 * time.monotonic())
    really = time.sleep
    time.sleep = lambda seconds: getattr(getattr(HERE, "rank", None), "sleep", really)(seconds)


def _leave_out_the_process() -> None:
    """The time of imports and of garbage collection, once for all ranks, is no rank's."""

    def apart(load: Callable[..., Any]) -> Callable[..., Any]:
        def found(*given: Any, **named: Any) -> Any:
            rank = getattr(HERE, "rank", None)
            if rank is None or HERE.imports:
                return load(*given, **named)
            rank.now()
            HERE.imports = (given[0] if given else named["name"]) or "."
            try:
                return load(*given, **named)
            finally:
                HERE.imports, rank.cpu = "", time.thread_time()

        return found

    builtins.__import__ = apart(builtins.__import__)
    importlib.import_module = apart(importlib.import_module)
    vars(extras)["import_module"] = importlib.import_module  # by which ours load what they use

    def collected(phase: str, _: Any) -> None:
        now, rank = time.thread_time(), getattr(HERE, "rank", None)
        if rank is not None and phase == "stop":
            rank.cpu = min(now, rank.cpu + now - HERE.collects)
        HERE.collects = now

    gc.callbacks.append(collected)


def end_process(status: int) -> NoReturn:
    """Ends the process, in which all ranks are, with what they have printed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
