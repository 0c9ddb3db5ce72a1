"""The data set on all ranks: the same, or an error on all of them."""

import socket
from collections import Counter
from collections.abc import Callable

from mpi4py import MPI

from mpitrain.data import DataError, Dataset, digest
from mpitrain.ranks.together import together


def load_on_all(
    comm: MPI.Intracomm, load: Callable[[], Dataset], path: str = ""
) -> tuple[Dataset, str]:
    """The data set and its digest, once all ranks have the same; collective.

    Args:
        comm: the ranks.
        load: the data as a rank has them.
        path: where they come from, for errors.

    Raises:
        ImportError: as :func:`load`.
        DataError: on all ranks: one of them cannot read a file, or reads other samples.
    """
    found, own = together(comm, lambda: _with_digest(load()), DataError)
    tests = len(found.test) if found.test is not None else "none"
    sizes = f"{len(found.train)} samples to train and {tests} to test on"
    every = comm.allgather((own, f"on {socket.gethostname()}, {sizes}, {found.classes} classes"))
    usual, _ = Counter(digest for digest, _ in every).most_common(1)[0]
    outliers = [rank for rank, (digest, _) in enumerate(every) if digest != usual]
    if outliers:
        other = [digest for digest, _ in every].index(usual)
        what = f"data.path = {path!r}" if path else "them"
        raise DataError(
            f"the ranks have different data: rank {outliers[0]} ({every[outliers[0]][1]}), rank "
            f"{other} ({every[other][1]}); make {what} the same on all nodes"
        )
    return found, own


def _with_digest(found: Dataset) -> tuple[Dataset, str]:
    return found, digest(found)
