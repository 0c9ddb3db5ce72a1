"""The data set on all ranks: the same, or an error on all of them."""

import socket
from collections import Counter

from mpi4py import MPI
from numpy.typing import DTypeLike

from mpitrain.config import Data
from mpitrain.data import DataError, Dataset, digest, load
from mpitrain.together import together


def load_on_all(comm: MPI.Intracomm, config: Data, dtype: DTypeLike) -> tuple[Dataset, str]:
    """The data set and its digest, once all ranks have the same; collective.

    Raises:
        ImportError: as :func:`load`.
        DataError: on all ranks: one of them cannot read a file, or reads other samples.
    """
    found, own = together(comm, lambda: _load_and_digest(config, dtype), DataError)
    sizes = f"{len(found.train)} samples to train and {len(found.test)} to test on"
    every = comm.allgather((own, f"on {socket.gethostname()}, {sizes}, {found.classes} classes"))
    usual, _ = Counter(digest for digest, _ in every).most_common(1)[0]
    outliers = [rank for rank, (digest, _) in enumerate(every) if digest != usual]
    if outliers:
        other = [digest for digest, _ in every].index(usual)
        raise DataError(
            f"the ranks have different data: rank {outliers[0]} ({every[outliers[0]][1]}), rank "
            f"{other} ({every[other][1]}); make data.path = {config.path!r} the same on all nodes"
        )
    return found, own


def _load_and_digest(config: Data, dtype: DTypeLike) -> tuple[Dataset, str]:
    found = load(config, dtype)
    return found, digest(found)
