"""Training without dead ranks: experimental, with Open MPI's ULFM (``mpirun --with-ft ulfm``).

A rank that waits for a dead one gets an error and *revokes* all of its communicators, so that
other waiting ranks get one, too.  All survivors then *shrink* the communicator (Bland et al.,
Post-failure recovery of MPI communication capability, 2013) and go on from the newest checkpoint.
"""

import os
import sys
from collections.abc import Iterable, Mapping
from typing import NoReturn

from mpi4py import MPI

from collectives import Communicator
from mpitrain.config import Config, ConfigError, expect


def check(config: Config, environment: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError, on all ranks, where a death would end them all or leave some waiting."""
    if MPI.get_vendor()[0] != "Open MPI" or environment.get("OMPI_MCA_mpi_ft_enable") != "1":
        raise ConfigError("--shrink needs Open MPI, started with 'mpirun --with-ft ulfm'")
    expect(config, "shrink")
    if not config.checkpoint.every:
        raise ConfigError("--shrink goes on from checkpoints; set checkpoint.every")


def is_death(error: MPI.Exception) -> bool:
    """Whether an error may mean that a rank has died, or that a communicator was revoked."""
    return error.Get_error_class() in (
        MPI.ERR_IN_STATUS,  # one of several requests
        MPI.ERR_PROC_FAILED,
        MPI.ERR_PROC_FAILED_PENDING,
        MPI.ERR_REVOKED,
    )


def leave(comm: MPI.Intracomm, status: int) -> NoReturn:
    """Ends the survivors' processes together, without MPI_Finalize, which may wait for the dead."""
    comm.Barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def survivors(comm: Communicator, others: Iterable[Communicator]) -> Communicator:
    """Communicator of the living ranks of ``comm``, with its settings; collective over these.

    ``others``: communicators in which ranks may be waiting for this one.  RuntimeError on all
    ranks: nobody has died.
    """
    for one in (*others, comm):
        one.Revoke()
    left = comm.Shrink()
    if left.size == comm.size:
        raise RuntimeError("MPI reported the death of a rank, but all of them live")
    return left
