"""Any rank as the root of an algorithm that is written for root 0."""

from collections.abc import Callable, Iterator

from collectives.schedule import Chunk, Round, mapped

Rounds = Callable[..., Iterator[Round]]


def rotated(rounds: Rounds, *buffers: str) -> Rounds:
    """``rounds(rank, size, root)`` from ``rounds(rank, size)``: every rank ``root`` further.

    Args:
        buffers: names of the buffers with a block for each rank; their blocks move along with the
            ranks, and a range of blocks that wraps round the end becomes two messages.
    """

    def at_root(rank: int, size: int, root: int) -> Iterator[Round]:
        def further(chunk: Chunk) -> list[Chunk]:
            if chunk.buffer not in buffers:
                return [chunk]
            start, stop = chunk.start + root, chunk.stop + root
            parts = (start, min(stop, size)), (max(start - size, 0), stop - size)
            return [Chunk(chunk.buffer, a, b) for a, b in parts if a < b]

        def at(peer: int) -> int:
            return (peer + root) % size

        if root == 0:
            yield from rounds(rank, size)
            return
        for steps in rounds((rank - root) % size, size):
            yield tuple(moved for step in steps for moved in mapped(step, further, at))

    return at_root
