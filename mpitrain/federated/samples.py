"""Training samples of clients, and of workers that have samples of their own, on all ranks."""

from hashlib import blake2b
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from collectives.errors import words
from mpitrain.arrays import Array
from mpitrain.config import ConfigError
from mpitrain.config.federated import Federated
from mpitrain.data import DataError, Sampler
from mpitrain.data.sampler import OfWorkers
from mpitrain.data.stream import Streamed
from mpitrain.federated.split import split
from mpitrain.group import share
from mpitrain.ranks.same import expect_same
from mpitrain.ranks.together import together
from mpitrain.training.partition import layout_of

if TYPE_CHECKING:
    from mpitrain.training.parts import Parts

#: Samples whose labels are read at a time.
_AT_A_TIME = 4096


def of_clients(
    parts: "Parts", own: Federated, table: str = "federated"
) -> tuple[list[Array], list[str]]:
    """The samples of each client, as rising indices, and the clients' names; collective.

    ``own``: how they are split, as ``table`` of the job says.

    Raises:
        ConfigError: on all ranks: the samples cannot be split so, are read in turn, or have an
            order of the program's; it names other clients on other ranks, or none for a sample.
        DataError: on all ranks: labels cannot be read.
    """
    data = cast(Any, parts.data.train)
    if isinstance(data, Streamed):
        raise ConfigError(
            f"{table}: the training data are read in turn, and clients have samples here and "
            "there among them; give data that are read by number"
        )

    order = (parts.data.sampler or Sampler)(len(data), 1, 0)
    if (type(order), order.shuffles, order.drop_last) != (Sampler, True, False):
        raise ConfigError(
            f"{table}: each client or worker draws the order of its own samples, and leaves none "
            "out; give data without a sampler, with shuffle=True and drop_last=False"
        )

    def found() -> tuple[list[Array], list[str]]:
        if own.split == "own":
            return _named(parts.objects.clients, getattr(data, "data", data), len(data))
        labels = None
        if own.split != "iid" and parts.data.classes and not parts.data.label_shape:
            starts = range(0, len(data), _AT_A_TIME)
            labels = np.concatenate([data[i : i + _AT_A_TIME].labels for i in starts])
        samples = split(own, parts.config.run.seed, len(data), labels, table)
        return samples, [str(client) for client in range(own.clients)]

    samples, names = together(parts.comm, found, ConfigError, DataError)
    digest = blake2b(b"".join(blake2b(one.tobytes()).digest() for one in samples)).hexdigest()
    expect_same(parts.comm, {"clients": names, "the samples of each client": digest})
    if own.split == "own":  # which a run that goes on must have again
        parts.data_digest += digest
    return samples, names


def _named(given: Any, data: Any, samples: int) -> tuple[list[Array], list[str]]:
    """The samples of each client that the program names, in the order of these names."""
    try:
        whose = given(data) if callable(given) else given
        names = np.asarray(whose)
        is_kept = names.ndim == 1 and names.tolist() == list(whose)  # 1 beside "1" is not
        "".join(map(str, names)).encode()
    except Exception as error:  # whatever a program's own function raises
        raise ConfigError(f"own.clients: they cannot be read: {words(error)}") from error
    if names.shape != (samples,) or names.dtype.kind not in "iuU" or not is_kept:
        raise ConfigError(
            f"own.clients: expected the client of each of the {samples} training samples, whole "
            f"numbers or texts of shape ({samples},), got {names.dtype} of shape {names.shape}"
        )
    kinds, client = np.unique(names, return_inverse=True)
    ends = np.cumsum(np.bincount(client))[:-1]
    return np.split(np.argsort(client, kind="stable"), ends), [str(name) for name in kinds]


def of_workers(parts: "Parts", order: Sampler) -> OfWorkers:
    """The order of samples in which each worker has its own, as [sync] says; collective.

    Raises:
        ConfigError, DataError: as :func:`of_clients`; there are fewer clients than workers.
    """
    config, sync = parts.config, parts.config.sync
    workers = layout_of(config, parts.comm.size).replicas[0]
    by = Federated(workers, split=cast(Any, sync.split), alpha=sync.alpha, labels=sync.labels)
    found, _ = of_clients(parts, by, "sync")
    if len(found) < workers:
        raise ConfigError(
            f"own.clients: {len(found)} clients cannot be shared by {workers} workers; name more, "
            "or take fewer replicas"
        )
    own = [np.concatenate(found[share(len(found), w, workers)]) for w in range(workers)]
    seen = order.samples, order.batch_size, order.seed
    return OfWorkers(*seen, own=own, micro_batches=config.train.micro_batches)
