"""Where the ranks' buffers lie in memory that they share: told when the ranks meet, and read."""

import struct
from collections.abc import Callable

from collectives.calls.call import Call
from collectives.calls.resources import Resources
from collectives.execution.memory import HOST
from collectives.execution.plan import Plan
from collectives.execution.progress import Underway
from collectives.execution.shared import Places
from collectives.execution.transport.shared_memory import WORDS, Meeting, NodeMemory
from collectives.execution.transport.windows import Place

# Instead of a window's number, and of an address:
_NO_BUFFER = -1
_ORDINARY = -2
_FORMAT = f"{WORDS}q"


class Meetings:
    """The meetings of one communicator's ranks.

    Args:
        auto_below: the bytes below which ``auto`` is native, of a collective.
    """

    def __init__(
        self,
        resources: Resources,
        underway: Underway,
        auto_below: Callable[[str], int],
    ) -> None:
        self._resources = resources
        self._underway = underway
        self._auto_below = auto_below

    def words(self, call: Call) -> tuple[int, ...] | None:
        """What this rank says of where its buffers lie; ``None`` if the ranks do not meet for this
        call.  Which of both is the same on all ranks.  Collective at first use."""
        if call.counts is not None:
            return None
        node = self._resources.node
        if node is None:
            return None
        may_be_native = call.algorithm == "auto" and not call.is_on_device
        if may_be_native and call.nbytes < self._auto_below(call.collective):
            return None
        return words(call, node)

    def meet(self, mine: tuple[int, ...], plan: Plan | None = None) -> Meeting:
        """What each rank brought: its :func:`words`, and which ``plan`` it has for such a call."""
        node, underway = self._resources.node, self._underway
        assert node is not None, "ranks meet in its memory"
        underway.expect_whole()
        try:
            brought = *mine, -1 if plan is None else plan.lane
            return node.meet(brought, underway.progress if underway.here else None)
        except BaseException as error:  # a signal handler's
            underway.leave("the ranks' meeting", error)
            raise


def words(call: Call, node: NodeMemory) -> tuple[int, ...]:
    """What a rank says of where its buffers lie, when the ranks meet: their windows and offsets."""
    found: list[int] = []
    apart = call.algorithm != "auto" or not call.overlap
    for buffer in (call.send, call.recv):
        if buffer is None:
            found += (_NO_BUFFER, 0)
        elif call.counts or call.aside or buffer.gaps is not None or not apart:
            found += (_ORDINARY, 0)
        else:
            found += node.locate(buffer.address, buffer.items.nbytes) or (_ORDINARY, 0)
    return tuple(found)


def still_there(words: tuple[int, ...], node: NodeMemory) -> bool:
    """Whether memory that was once at these places, by its address, is there now."""
    send, recv, uses = words[0], words[2], node.windows.uses
    return (send < 0 or uses(send)) and (recv < 0 or uses(recv))


def all_have(meeting: Meeting, plan: Plan) -> bool:
    """Whether all ranks brought this plan, so that none has other memory than before."""
    return all(struct.unpack(_FORMAT, words)[-1] == plan.lane for words in meeting)


def shared_places(meeting: Meeting, node: NodeMemory) -> Places | None:
    """Where all ranks' buffers lie in memory that all of them map; ``None`` if some are not there,
    or on a GPU and others not.

    Args:
        meeting: where all ranks brought their :func:`words`.
    """
    told = [struct.unpack(_FORMAT, words) for words in meeting]
    if any(_ORDINARY in (words[0], words[2]) for words in told):
        return None

    def place(window: int, offset: int) -> Place | None:
        return None if window == _NO_BUFFER else Place(window, offset)

    places = tuple((place(*words[:2]), place(*words[2:4])) for words in told)
    on_host = {node.windows[one.window].memory is HOST for both in places for one in both if one}
    return places if len(on_host) == 1 else None
