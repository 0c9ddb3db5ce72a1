"""Reads the choices of an earlier run by quorum from its records."""

from pathlib import Path

from mpi4py import MPI

from mpitrain.config import ConfigError
from mpitrain.metrics.reader import read_records
from mpitrain.metrics.records import Skipped, Step
from mpitrain.ranks.together import by_rank_0
from mpitrain.sync.strategy import Taken


def choices(comm: MPI.Intracomm, path: Path) -> dict[int, Taken]:
    """The gradients that each step of an earlier run took, by steps counted from 1; collective.

    ``comm``: one rank of each worker.  ConfigError on all ranks: there is no such file at ``path``,
    or its run had no quorum or other workers.
    """
    return by_rank_0(comm, lambda: _read(path, comm.size), ConfigError)


def _read(path: Path, workers: int) -> dict[int, Taken]:
    try:
        log = read_records(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"sync.replay: {path} cannot be read: {error}") from error
    found: dict[int, Taken] = {}
    for record in log.records:
        if isinstance(record, Step | Skipped) and record.sync and record.sync.taken:
            found[record.step] = tuple(tuple(steps) for steps in record.sync.taken)
    counts = {len(taken) for taken in found.values()}
    if counts != {workers}:
        had = f"{max(counts)} workers" if counts else "no steps by quorum"
        raise ConfigError(
            f"sync.replay: {path} is from a run with {had}, and this run has {workers}; name the "
            "file of a run by quorum with the same number of workers"
        )
    return found
