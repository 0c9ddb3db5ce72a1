"""Going on without ranks that died: experimental, with Open MPI's ULFM (``mpirun --with-ft ulfm``).

A rank that waits for a dead one gets an error; it *revokes* all of its communicators, so that those
who wait for it get one, too, until all survivors are here and *shrink* the communicator (Bland et
al., Post-failure recovery of MPI communication capability, 2013).  They go on from the newest
checkpoint.
"""

import os
import sys
from collections.abc import Iterable, Mapping
from typing import NoReturn

from mpi4py import MPI

from collectives import Communicator
from mpitrain.config import Config, ConfigError, expect


def check(config: Config, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse, on all ranks, where a death would end all ranks, or make some wait for ever.

    Raises:
        ConfigError: with what to do.
    """
    if MPI.get_vendor()[0] != "Open MPI" or environment.get("OMPI_MCA_mpi_ft_enable") != "1":
        raise ConfigError("--shrink needs Open MPI, started with 'mpirun --with-ft ulfm'")
    expect(config, "shrink")
    if not config.checkpoint.every:
        raise ConfigError("--shrink goes on from checkpoints; set checkpoint.every")


def is_death(error: MPI.Exception) -> bool:
    """Whether an error may say that a rank has died, or that another has heard of it."""
    return error.Get_error_class() in (
        MPI.ERR_IN_STATUS,  # one of several requests
        MPI.ERR_PROC_FAILED,
        MPI.ERR_PROC_FAILED_PENDING,
        MPI.ERR_REVOKED,
    )


def leave(comm: MPI.Intracomm, status: int) -> NoReturn:
    """End the survivors' processes, once all of them are here.

    They do not finalise MPI, which now and then waits for the dead for ever.
    """
    comm.Barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def survivors(comm: Communicator, others: Iterable[Communicator]) -> Communicator:
    """The ranks of ``comm`` that live, with its settings; collective over these.

    Args:
        comm: the communicator of all ranks.
        others: all the communicators in which somebody may be waiting for us.

    Raises:
        RuntimeError: on all ranks, if nobody has died.
    """
    for one in (*others, comm):
        one.Revoke()
    left = comm.Shrink()
    if left.size == comm.size:
        raise RuntimeError("MPI reported the death of a rank, but all of them live")
    return left
