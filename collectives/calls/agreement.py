"""Comparing calls across ranks before they run: an error on all ranks instead of a hang."""

import pickle
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.errors import MismatchError
from collectives.failure.history import call_site


class Agreement:
    """Compares the calls of one communicator.

    Args:
        wait: for a request, while what else is under way goes on.
    """

    def __init__(self, wait: Callable[[MPI.Request], None]) -> None:
        self._wait = wait
        self._calls = 0

    def check(self, channel: MPI.Intracomm, call: str, lengths: Mapping[Hashable, int]) -> None:
        """Raises :class:`MismatchError` on all ranks unless they all make the same call.

        Collective.  Cost: an all-gather of 8 bytes a rank, and one of some 200; of a v-variant, of
        its counts, too.

        Args:
            call: in words that are the same on all ranks.
            lengths: bytes of blocks by name; ranks that know a block must know the same length.
        """
        self._calls += 1
        code, line = call_site()
        site = f"{Path(code.co_filename).name}:{line}" if code else "unknown place"
        everybody = self.gathered(channel, (call, site, dict(lengths)))
        ranks: dict[str, list[int]] = {}
        for rank, (other, _, _) in enumerate(everybody):
            ranks.setdefault(other, []).append(rank)
        where = f"(number {self._calls} of this communicator)"
        if len(ranks) > 1:
            listed = "; ".join(
                f"{names_of(who)}: {what} (at {everybody[who[0]][1]})"
                for what, who in ranks.items()
            )
            raise MismatchError(f"the ranks' calls do not belong together {where}: {listed}")
        known: dict[Hashable, tuple[int, int]] = {}
        for rank, (_, place, told) in enumerate(everybody):
            for block, nbytes in told.items():
                first, length = known.setdefault(block, (rank, nbytes))
                if length != nbytes:
                    raise MismatchError(
                        f"the ranks' counts do not belong together {where}: {call}: rank {first} "
                        f"(at {everybody[first][1]}) has {length} bytes where rank {rank} (at "
                        f"{place}) has {nbytes}: {_block(block)}"
                    )

    def gathered(self, channel: MPI.Intracomm, mine: Any) -> list[Any]:
        """What each rank passes.  Collective."""
        own = np.frombuffer(pickle.dumps(mine), np.uint8)
        lengths = np.empty(channel.size, np.int64)
        self._wait(channel.Iallgather(np.array([own.size]), lengths))
        told = np.empty(lengths.sum(), np.uint8)
        self._wait(channel.Iallgatherv(own, [told, lengths]))
        return [pickle.loads(part.tobytes()) for part in np.split(told, np.cumsum(lengths)[:-1])]


def names_of(ranks: list[int]) -> str:
    """``ranks 1, 2``."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _block(block: Hashable) -> str:
    if isinstance(block, tuple):
        return f"the block from rank {block[0]} to rank {block[1]}"
    return f"the block of rank {block}"
