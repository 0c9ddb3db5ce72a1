"""Training samples of each client: drawn evenly, or as unequal as clients' own data."""

from itertools import pairwise

import numpy as np

from mpitrain.arrays import Array
from mpitrain.compress.seeds import generator
from mpitrain.config import ConfigError
from mpitrain.config.federated import Federated
from mpitrain.group import share


def split(
    own: Federated, seed: int, samples: int, labels: Array | None, table: str = "federated"
) -> list[Array]:
    """The samples of each client, as rising indices; each client has one, and no sample has two.

    ``labels``: class of each sample, of shape (samples,); None without classes.  ``table``: that of
    the job which asks for it.

    Raises:
        ConfigError: there are more clients than samples, or no classes to split by.
    """
    if own.clients > samples:
        raise ConfigError(
            f"{table}.clients = {own.clients} must be at most {samples}, the number of training "
            "samples"
        )
    rng = generator(seed, "clients", "split")
    if own.split == "iid":
        order = rng.permutation(samples)
        found = [order[share(samples, client, own.clients)] for client in range(own.clients)]
    elif labels is None:
        raise ConfigError(
            f"{table}.split: {own.split!r} goes by the classes of the samples, and these have "
            "none; take 'iid'"
        )
    elif own.split == "dirichlet":
        found = _dirichlet(rng, own, labels)
    else:
        found = _by_labels(rng, own, labels, table)
    return [np.sort(part) for part in found]


def _dirichlet(rng: np.random.Generator, own: Federated, labels: Array) -> list[Array]:
    """Each class in parts of drawn sizes; a client without samples gets one of the richest."""
    parts: list[list[Array]] = [[] for _ in range(own.clients)]
    for label in np.unique(labels):
        those = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(own.clients, own.alpha))
        ends = np.rint(np.cumsum(shares) * len(those)).astype(np.int64)
        ends[-1] = len(those)
        for part, (low, high) in zip(parts, pairwise([0, *ends.tolist()]), strict=True):
            part.append(those[low:high])
    found = [np.concatenate(part) for part in parts]
    sizes = np.array([len(part) for part in found])
    for client in np.flatnonzero(sizes == 0).tolist():
        richest = int(sizes.argmax())
        found[client], found[richest] = found[richest][-1:], found[richest][:-1]
        sizes[client], sizes[richest] = 1, sizes[richest] - 1
    return found


def _by_labels(rng: np.random.Generator, own: Federated, labels: Array, table: str) -> list[Array]:
    """``own.labels`` classes for each client, in turn, and each class evenly among its clients."""
    kinds = np.unique(labels)
    if own.labels > len(kinds):
        raise ConfigError(
            f"{table}.labels = {own.labels} must be at most {len(kinds)}, the number of classes"
        )
    if own.clients * own.labels < len(kinds):
        raise ConfigError(
            f"{table}.labels: {own.clients} clients of {own.labels} classes each leave some of "
            f"the {len(kinds)} classes to nobody; raise clients or labels"
        )
    circle, who = rng.permutation(kinds), rng.permutation(own.clients)
    slots = np.arange(own.clients * own.labels).reshape(own.clients, own.labels) % len(kinds)
    parts: list[list[Array]] = [[] for _ in range(own.clients)]
    for number, label in enumerate(circle):
        mine = who[(slots == number).any(axis=1)]
        those = rng.permutation(np.flatnonzero(labels == label))
        for place, client in enumerate(mine.tolist()):
            parts[client].append(those[share(len(those), place, len(mine))])
    found = [np.concatenate(part) for part in parts]
    if not all(map(len, found)):
        raise ConfigError(
            f"{table}.split: with {own.clients} clients of {own.labels} classes each some get no "
            "sample; lower clients, or raise labels"
        )
    return found
