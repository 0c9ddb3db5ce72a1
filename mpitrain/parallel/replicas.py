"""Proof that ranks which should hold the same parameters do."""

import hashlib
from collections import Counter

from mpi4py import MPI

from mpitrain.nn import Array


class ReplicaMismatch(RuntimeError):
    """Ranks that should hold the same parameters hold different ones."""


def check_replicas(comm: MPI.Intracomm, parameters: Array, when: str) -> None:
    """Compare ``parameters`` bit by bit over the ranks of ``comm``, through 16-byte digests.

    Collective; costs one pass over the memory and an all-gather of 16 bytes.

    Args:
        comm: the ranks.
        parameters: an array of the same size everywhere.
        when: for the message, as in ``"after epoch 3"``.

    Raises:
        ReplicaMismatch: on every rank, naming those that differ from the majority.
    """
    digest = hashlib.blake2b(parameters.tobytes(), digest_size=16).digest()
    digests = comm.allgather(digest)
    usual, _ = Counter(digests).most_common(1)[0]
    outliers = [rank for rank, found in enumerate(digests) if found != usual]
    if outliers:
        agreeing = [rank for rank, found in enumerate(digests) if found == usual]
        raise ReplicaMismatch(
            f"parameters differ between ranks {when}: {_ranks(outliers)} against "
            f"{_ranks(agreeing)}; look for state or random numbers that depend on the rank"
        )


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
