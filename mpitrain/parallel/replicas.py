"""Check that ranks which should hold the same numbers do."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence

from mpi4py import MPI

from mpitrain.arrays import Array

#: Arrays listed in a message before "and N more".
_SHOWN = 3


class ReplicaMismatch(RuntimeError):
    """Ranks that should hold the same numbers hold different ones."""


def check_replicas(
    world: MPI.Intracomm, groups: Sequence[tuple[MPI.Intracomm, Mapping[str, Array]]], when: str
) -> None:
    """Compare arrays bit by bit, through 16-byte digests; collective.

    Cost: one pass over the memory, and an all-gather of 16 bytes in each group.

    Args:
        world: all ranks.
        groups: ranks that should hold the same arrays, and these by name, as far as this one is in.
        when: time of the comparison, as in ``"after epoch 3"``.

    Raises:
        ReplicaMismatch: on all ranks; names the ranks that differ from the majority, and arrays.
    """
    own = [text for comm, arrays in groups if (text := _difference(world.rank, comm, arrays))]
    found = [text for texts in world.allgather(own) for text in texts]
    if found:
        raise ReplicaMismatch(
            f"replicas differ {when}: {found[0]}; look for state or random numbers that depend on "
            "the rank, or for faulty memory on its node"
        )


def _difference(rank: int, comm: MPI.Intracomm, arrays: Mapping[str, Array]) -> str:
    """Ranks that differ, and in which arrays, as text; empty if none does; collective."""
    digests = {name: _digest(array.tobytes()) for name, array in arrays.items()}
    whole = _digest(b"".join(digests.values()))
    told = comm.allgather((rank, whole))
    usual, _ = Counter(digest for _, digest in told).most_common(1)[0]
    outliers = [other for other, digest in told if digest != usual]
    if not outliers:
        return ""
    agreeing = [other for other, digest in told if digest == usual]
    every = comm.allgather(digests)
    names = dict.fromkeys(name for theirs in every for name in theirs)
    wrong = [name for name in names if len({theirs.get(name) for theirs in every}) > 1]
    more = f" and {len(wrong) - _SHOWN} more" if wrong[_SHOWN:] else ""
    return f"{_ranks(outliers)} against {_ranks(agreeing)} in {', '.join(wrong[:_SHOWN])}{more}"


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
