"""Comparing calls across ranks before they run: an error on all ranks instead of a hang."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from mpi4py import MPI

from collectives.errors import MismatchError
from collectives.watchdog.calls import call_site

#: Room for a call in words, and for the place in the user's code where it was made.
_CALL_BYTES = 256
_SITE_BYTES = 96


class Agreement:
    """Compares the calls of one communicator.

    Args:
        idle: called while waiting, as something else may be under way that the others need.
    """

    def __init__(self, idle: Callable[[], None]) -> None:
        self.idle = idle
        self._calls = 0

    def check(self, channel: MPI.Intracomm, call: str) -> None:
        """Raises :class:`MismatchError` on all ranks unless they all make the same call.

        Collective.  Cost: one all-gather of 352 bytes a rank.
        """
        self._calls += 1
        code, line = call_site()
        site = f"{Path(code.co_filename).name}:{line}" if code else "unknown place"
        mine = np.zeros(_CALL_BYTES + _SITE_BYTES, np.uint8)
        for text, first, room in ((call, 0, _CALL_BYTES), (site, _CALL_BYTES, _SITE_BYTES)):
            encoded = text.encode()[:room]
            mine[first : first + len(encoded)] = list(encoded)
        everybody = np.empty((channel.size, mine.size), np.uint8)
        request = channel.Iallgather(mine, everybody)
        while not request.Test():
            self.idle()
        ranks: dict[str, list[int]] = {}
        for rank, told in enumerate(everybody):
            ranks.setdefault(_text(told[:_CALL_BYTES]), []).append(rank)
        if len(ranks) > 1:
            listed = "; ".join(
                f"{_names(who)}: {what} (at {_text(everybody[who[0], _CALL_BYTES:])})"
                for what, who in ranks.items()
            )
            raise MismatchError(
                f"the ranks' calls do not belong together (number {self._calls} of this "
                f"communicator): {listed}"
            )


def _names(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _text(told: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]") -> str:
    return told.tobytes().rstrip(b"\0").decode(errors="replace")
