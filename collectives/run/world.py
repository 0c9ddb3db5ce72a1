"""Our communicator in the place of ``MPI.COMM_WORLD``, for a program that knows nothing of it."""

import atexit
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpi4py import MPI

from collectives.calls.methods.derived import Nonblocking, Persistent
from collectives.communicator import Communicator
from collectives.topologies import mpi_class

#: mpi4py's own, which pickles of its copies look for in a module.
COMM_WORLD = MPI.COMM_WORLD


class Intracomm(Communicator):
    """Our blocking collectives; the nonblocking and persistent ones are mpi4py's own, as only its
    requests go into ``MPI.Request.Waitall``."""

    __module__ = "mpi4py.MPI"  # by which petsc4py and others know a communicator

    def free(self) -> None:
        """As mpi4py's, whose constants stay."""
        if self is not MPI.COMM_WORLD:
            super().free()

    def __reduce__(self) -> Any:
        """As mpi4py's: a constant by its name, copies of it, and no other."""
        if self is MPI.COMM_WORLD:
            return _world, ()
        return mpi_class(type(self))(self).__reduce__()


def _world() -> MPI.Intracomm:
    return MPI.COMM_WORLD


for _name in (*vars(Nonblocking), *vars(Persistent)):
    if not _name.startswith("_"):
        setattr(Intracomm, _name, getattr(MPI.Intracomm, _name))


def install(module: Any, gains: bool, profile: str | None) -> None:
    """Puts ours into ``mpi4py.MPI``; what was asked for is printed when Python or MPI ends.

    Raises:
        LaunchError: a launcher has started more processes than MPI sees.
    """
    if not (gains or profile):
        module.COMM_WORLD = Intracomm(MPI.COMM_WORLD)
        return
    from collectives.run import calls, record, report
    from collectives.run.profile import Profile

    recorder, ends = record.Recorder(), list[Callable[[], None]]()
    watch = calls.Watch(recorder)
    if gains and MPI.COMM_WORLD.rank == 0:
        ends.append(lambda: print(report.gains(recorder.sites.values()), file=sys.stderr))
    if profile:
        ends.append(Profile(recorder, Path(profile).absolute()).finish)
    module.COMM_WORLD = watch.communicator(Intracomm)(MPI.COMM_WORLD)
    module.Request, module.Prequest = watch.kinds.values()
    process, finalize = os.getpid(), module.Finalize

    def end() -> None:
        while ends and os.getpid() == process and not module.Is_finalized():
            ends.pop()()

    module.Finalize = lambda: (end(), finalize())[1]  # type: ignore[func-returns-value]
    atexit.register(end)
