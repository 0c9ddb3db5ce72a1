"""Our communicator in the place of ``MPI.COMM_WORLD``, for a program that knows nothing of it."""

import atexit
import os
import sys
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from collectives.calls.methods.derived import Nonblocking, Persistent
from collectives.communicator import Communicator


class Intracomm(Communicator):  # type: ignore[misc]
    """Our blocking collectives; the nonblocking and persistent ones are mpi4py's own, as only its
    requests go into ``MPI.Request.Waitall``."""

    __module__ = "mpi4py.MPI"  # by which petsc4py and others know a communicator


for _name in (*vars(Nonblocking), *vars(Persistent)):
    if not _name.startswith("_"):
        setattr(Intracomm, _name, getattr(MPI.Intracomm, _name))


def install(module: Any, gains: bool, profile: str | None) -> None:
    """Puts ours into ``mpi4py.MPI``; what was asked for is printed when Python or MPI ends.

    Raises:
        LaunchError: a launcher has started more processes than MPI sees.
    """
    kind: type[Any] = Intracomm
    ends: list[Callable[[], None]] = []
    if gains or profile:
        from collectives.run.calls import Watch
        from collectives.run.profile import Profile
        from collectives.run.record import Records
        from collectives.run.report import gains as table

        records = Records([])
        watch = Watch(records)
        kind = watch.communicator(Intracomm)
        if gains and MPI.COMM_WORLD.rank == 0:
            ends.append(
                lambda: print(table(records.own.sites.values()), file=sys.stderr, flush=True)
            )
        if profile:
            ends.append(Profile(records, os.path.abspath(profile)).finish)
    module.COMM_WORLD = kind(MPI.COMM_WORLD)
    if profile:
        module.Request, module.Prequest = watch.kinds.values()
    process, finalize = os.getpid(), module.Finalize

    def end() -> None:
        while ends and os.getpid() == process and not module.Is_finalized():
            ends.pop()()

    def finalise() -> None:
        end()
        finalize()

    if ends:
        module.Finalize = finalise
        atexit.register(end)
