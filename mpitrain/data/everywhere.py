"""One data set on all ranks, or an error on all of them."""

import socket
from collections import Counter
from collections.abc import Callable

from mpi4py import MPI

from mpitrain.data import DataError, Dataset, digest
from mpitrain.ranks.together import together


def load_on_all(
    comm: MPI.Intracomm, load: Callable[[], Dataset], path: str = ""
) -> tuple[Dataset, str]:
    """Data set and its digest, which are the same on all ranks; collective.

    Args:
        comm: the ranks.
        load: reads the data on a rank.
        path: path of the data, for errors.

    Raises:
        ImportError: a package for the data is missing.
        DataError: on all ranks, if one of them cannot read a file or reads other samples.
    """
    found = together(comm, load, DataError)
    own = together(comm, lambda: digest(found), DataError)
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
