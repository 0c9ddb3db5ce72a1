"""Any rank as the root of an algorithm that is written for root 0."""

from collections.abc import Callable, Iterator

from collectives.schedule import Chunk, Copy, RecvReduce, Round, Send, Step

Rounds = Callable[..., Iterator[Round]]


def rotated(rounds: Rounds, *buffers: str) -> Rounds:
    """``rounds(rank, size, root)`` from ``rounds(rank, size)``: every rank ``root`` further.

    Args:
        buffers: those that have a block for each rank; their blocks move along with the ranks, and
            a range of blocks that then wraps round the end becomes two messages.
    """

    def at_root(rank: int, size: int, root: int) -> Iterator[Round]:
        def further(chunk: Chunk) -> list[Chunk]:
            if chunk.buffer not in buffers:
                return [chunk]
            start, stop = chunk.start + root, chunk.stop + root
            parts = (start, min(stop, size)), (max(start - size, 0), stop - size)
            return [Chunk(chunk.buffer, a, b) for a, b in parts if a < b]

        def moved(step: Step) -> Iterator[Step]:
            match step:
                case Copy(chunk, source):
                    pairs = zip(further(chunk), further(source), strict=True)
                    yield from (Copy(c, s) for c, s in pairs)
                case RecvReduce(peer):
                    yield step._replace(peer=(peer + root) % size)
                case _:
                    kind = Send if isinstance(step, Send) else type(step)
                    for chunk in further(step.chunk):
                        yield kind((step.peer + root) % size, chunk)

        if root == 0:
            yield from rounds(rank, size)
            return
        for steps in rounds((rank - root) % size, size):
            yield tuple(s for step in steps for s in moved(step))

    return at_root
