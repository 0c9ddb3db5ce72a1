"""How ranks of one node tell each other where their buffers lie before they bind or run a plan."""

import struct
from collections.abc import Callable
from zlib import crc32

from collectives.calls.call import Call
from collectives.calls.resources import Resources
from collectives.errors import MismatchError, by_ranks
from collectives.execution.memory import HOST
from collectives.execution.plan import Plan
from collectives.execution.transport import WORDS, Meeting
from collectives.execution.transport.windows import Place, Places

# In the place of a window's number:
_NO_BUFFER = -1
_ORDINARY = -2
_FORMAT = f"{WORDS}q"

#: Windows and offsets of a rank's send and receive buffer; a checksum of the call.
Location = tuple[int, ...]


class Rendezvous:
    """The meetings of one communicator's ranks, in the memory that they share.

    Args:
        auto_below: the bytes below which ``auto`` takes the library's own collective, by the
            collective, and whether its blocks are unequal and its calls unordered.
    """

    def __init__(self, resources: Resources, auto_below: Callable[[str, bool, bool], int]) -> None:
        self._resources = resources
        self._progress = resources.progress
        self._auto_below = auto_below

    def location(self, call: Call, *, unordered: bool) -> Location | None:
        """The location of this rank's buffers; ``None``, on all ranks, where they do not meet for
        this call, ``unordered`` as a nonblocking one.  Collective at first use."""
        node = self._resources.node
        # Ranks without plans under way leave native calls to the library before they come here.
        if node is None or call.counts is not None or call.algorithm == "native":
            return None
        may_be_native = call.algorithm == "auto" and not call.is_on_device
        if may_be_native and call.nbytes < self._auto_below(call.collective, False, unordered):
            return None
        found: list[int] = []
        apart = call.algorithm != "auto" or not call.overlap
        for buffer in (call.send, call.recv):
            if buffer is None:
                found += (_NO_BUFFER, 0)
            elif call.aside or buffer.gaps is not None or not apart:
                found += (_ORDINARY, 0)
            else:
                found += node.locate(buffer.address, buffer.items.nbytes) or (_ORDINARY, 0)
        return *found, crc32(str(call).encode())

    def meet(self, mine: Location, plan: Plan | None = None) -> Meeting:
        """Waits for all ranks; what each of them brought: its location, and its ``plan`` of before
        for such a call."""
        node, progress = self._resources.node, self._progress
        assert node is not None, "ranks meet in its memory"
        progress.expect_whole()
        try:
            brought = *mine, -1 if plan is None else plan.number
            return node.meet(brought, progress.advance if progress.here else None)
        except BaseException as error:  # a signal handler's
            progress.leave("the ranks' meeting", error)
            raise

    def meet_again(self, mine: Location, plan: Plan | None = None) -> Meeting | None:
        """As :meth:`meet`; ``None`` if this rank's memory is not there any more."""
        node = self._resources.node
        if node is None:
            return None
        send, recv, uses = mine[0], mine[2], node.windows.uses
        if (send < 0 or uses(send)) and (recv < 0 or uses(recv)):
            return self.meet(mine, plan)
        return None

    def places(self, meeting: Meeting, call: Call) -> Places | None:
        """The places of all ranks' buffers in memory that all of them map; ``None`` if one lies
        elsewhere, or some are on a GPU and others not.

        Raises:
            MismatchError: on all ranks, if they have not met for one call.
        """
        node = self._resources.node
        assert node is not None, "ranks meet in its memory"
        told = [struct.unpack(_FORMAT, words) for words in meeting]
        if len({words[4] for words in told}) > 1:
            calls = by_ranks(self._resources.gathered(str(call)))
            raise MismatchError(
                f"the ranks' calls do not belong together: {calls}; COLLECTIVES_CHECK=1 names the "
                "lines"
            )
        if any(_ORDINARY in (words[0], words[2]) for words in told):
            return None
        places = tuple(map(_places, told))
        windows = {place.window for both in places for place in both if place}
        on_host = {node.windows[window].memory is HOST for window in windows}
        return places if len(on_host) == 1 else None


def _places(told: Location) -> tuple[Place | None, Place | None]:
    """The places of a rank's buffers, which lie in memory that the ranks share."""
    found = Place(*told[:2]), Place(*told[2:4])
    send, recv = (None if one.window == _NO_BUFFER else one for one in found)
    return send, recv


def all_have(meeting: Meeting, plan: Plan) -> bool:
    """Whether all ranks brought this plan, so that none has other memory than before."""
    return all(struct.unpack(_FORMAT, words)[-1] == plan.number for words in meeting)
