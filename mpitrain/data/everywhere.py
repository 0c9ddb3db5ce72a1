"""One data set on all ranks, or an error on all of them."""

import hashlib
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from mpi4py import MPI

from mpitrain.arrays import Array
from mpitrain.data import DataError, Dataset, Sampler, digest
from mpitrain.data.sampler import OwnOrder, joined
from mpitrain.ranks.together import together


def load_on_all(
    comm: MPI.Intracomm, load: Callable[[], Dataset], path: str = ""
) -> tuple[Dataset, str]:
    """Data set and its digest, which are the same on all ranks; collective.

    ``path`` is named in errors.

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
        way_out = (
            f"make data.path = {path!r} the same on all nodes"
            if path
            else "give all of them the whole data set, as the trainer divides its batches itself: "
            "leave out shard(), split_dataset_by_node() and the like, and what else goes by the "
            "rank"
        )
        raise DataError(
            f"the ranks have different data: rank {outliers[0]} ({every[outliers[0]][1]}), rank "
            f"{other} ({every[other][1]}); {way_out}"
        )
    return found, own


def expect_same_order(comm: MPI.Intracomm, order: Sampler) -> Sampler:
    """The order of the samples, of which the first epoch is the same on all ranks; collective.

    Raises:
        DataError: on all ranks: a program's own sampler gives two orders of one epoch, or ranks
            have others.
    """
    if isinstance(order, OwnOrder):
        _compare(comm, order, together(comm, order.expect_one_order, DataError), 0)
    return order


def batches_of(comm: MPI.Intracomm, order: Sampler, epoch: int, seen: int = 0) -> Iterator[Array]:
    """``order.batches(epoch, seen)``, which are the same on all ranks; collective.

    Raises:
        DataError: on all ranks: a program's own sampler fails, or gives ranks other batches.
    """
    if not isinstance(order, OwnOrder):
        return order.batches(epoch, seen)
    own = together(comm, lambda: [*order.batches(epoch, seen)], DataError)
    _compare(comm, order, own, epoch)
    return iter(own)


def _compare(comm: MPI.Intracomm, order: OwnOrder, own: Iterable[Array], epoch: int) -> None:
    if len(set(comm.allgather(hashlib.blake2b(joined(own)).digest()))) > 1:
        raise DataError(
            f"{type(order.given).__name__} gives other samples on some ranks than on others in "
            f"epoch {epoch}; let it give the same whole batches on all of them, as the trainer "
            "divides them itself"
        )
