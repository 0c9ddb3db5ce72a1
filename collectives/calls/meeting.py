"""Where the ranks' buffers lie in memory that they share: told when the ranks meet, and read."""

import struct

from collectives.calls.call import Call
from collectives.execution.memory import HOST
from collectives.execution.shared import Places
from collectives.execution.transport.shared_memory import Meeting, NodeMemory, Place

# Instead of a window's number:
_NO_BUFFER = -1
_ORDINARY = -2


def words(call: Call, node: NodeMemory) -> tuple[int, ...]:
    """What a rank says of where its buffers lie, when the ranks meet."""
    found: list[int] = []
    for buffer in (call.send, call.recv):
        if buffer is None:
            found += (_NO_BUFFER, 0)
        elif call.counts or call.aside or buffer.gaps is not None:
            found += (_ORDINARY, 0)
        else:
            found += node.locate(buffer.address, buffer.items.nbytes) or (_ORDINARY, 0)
    return tuple(found)


def still_there(words: tuple[int, ...], node: NodeMemory) -> bool:
    """Whether memory that was once at these places, by its address, is there now."""
    return all(number < 0 or node.windows.uses(number) for number in words[::2])


def shared_places(meeting: Meeting, node: NodeMemory) -> Places | None:
    """Where all ranks' buffers lie, or ``None`` if some of them are ordinary memory, or of another
    kind than the others.

    Args:
        meeting: where all ranks brought their :func:`words`.
    """
    found = [struct.unpack("4q", told) for told in meeting]
    if any(_ORDINARY in (send, recv) for send, _, recv, _ in found):
        return None

    def place(window: int, offset: int) -> Place | None:
        return None if window == _NO_BUFFER else Place(window, offset)

    places = tuple((place(*told[:2]), place(*told[2:])) for told in found)
    on_host = {node.windows[one.window].memory is HOST for both in places for one in both if one}
    return places if len(on_host) == 1 else None
