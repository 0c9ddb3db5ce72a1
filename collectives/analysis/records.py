"""Reader of the files that ``bench -J`` and Gloo's benchmark write."""

from pathlib import Path
from typing import Annotated

import msgspec

from collectives.contracts import MOST_RANKS
from collectives.errors import CollectiveError
from collectives.files import read_regular


class Record(msgspec.Struct, frozen=True):
    """One algorithm at one size: as :class:`collectives.bench.measure.Result` was written.

    Attributes:
        ran: the algorithm that ran; empty in Gloo's rows, which are all native.
        bytes: size of the larger buffer.
        in_place: whether both buffers were the same.
        ranks: number of ranks; 0 in Gloo's rows.
        p50_us: microseconds of a call, the median over repeats.
        floor_us: the time of the least memory traffic, where it was measured.

    Raises:
        ValueError: a row of ours lacks ``ran`` or ``ranks``.
    """

    collective: str
    algorithm: str
    memory: str
    bytes: Annotated[int, msgspec.Meta(ge=0)]
    in_place: bool
    p50_us: Annotated[float, msgspec.Meta(gt=0)]
    ran: str = ""
    ranks: Annotated[int, msgspec.Meta(ge=0, le=MOST_RANKS)] = 0
    floor_us: Annotated[float, msgspec.Meta(ge=0)] | None = None

    def __post_init__(self) -> None:
        if self.algorithm != "native" and not (self.ran and self.ranks):
            raise ValueError("a row of ours needs `ran` and `ranks`")


class Environment(msgspec.Struct, frozen=True):
    """The MPI library with its version, and its thread level; a file has more fields.

    Attributes:
        store_ns: what :func:`collectives.bench.stores.store_ns` found at the start.
    """

    mpi: str
    threads: str
    store_ns: list[float] | None = None

    def __str__(self) -> str:
        return f"{self.mpi}, {self.threads}"


class Measured(msgspec.Struct, frozen=True):
    environment: Environment
    results: list[Record]


#: Made once, here: threads that decode a type for the first time at once crash msgspec 0.22.
_DECODER = msgspec.json.Decoder(Measured)


def read(path: Path) -> Measured:
    """A file of a benchmark.

    Raises:
        CollectiveError: it cannot be read, or is no such file.
    """
    try:
        return _DECODER.decode(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:  # msgspec's are ValueErrors
        why = getattr(error, "strerror", error)
        raise CollectiveError(f"cannot read {path} as what 'bench -J' writes: {why}") from None
