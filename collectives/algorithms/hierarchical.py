"""Hierarchical: algorithms within the nodes and algorithms across them, composed.

Ranks are numbered node by node, ``local`` of them on each.  With rings in both directions it is the
all-reduce of a 2-D torus (Ying et al.: "Image classification at supercomputer scale", 2018).
"""

from collections.abc import Callable, Iterator

from collectives.schedule import Chunk, Round, Schedule, mapped

Where = Callable[[Chunk], Chunk]


def allreduce(scatter: Schedule, across: Schedule, gather: Schedule) -> Schedule:
    """Reduce-scatter in each node, all-reduce of each shard across the nodes, all-gather in each.

    All ranks of a node use the network at once, each for its shard.  Cost: the sum of the three; a
    rank sends 1/local of the buffer over the network.

    Args:
        scatter, gather: a reduce-scatter and an all-gather of the ranks of a node.
        across: an all-reduce of one rank of each node.
    """
    local, nodes, shard = scatter.size, across.size, across.chunks

    def generate(rank: int) -> Iterator[Round]:
        node, place = divmod(rank, local)
        inside, outside = node * local, place

        def of_scatter(chunk: Chunk) -> Chunk:
            return _spread(chunk, shard, place if chunk.buffer == "recvbuf" else 0)

        def of_across(chunk: Chunk) -> Chunk:
            first = place * shard
            return Chunk("recvbuf", first + chunk.start, first + chunk.stop)

        def of_gather(chunk: Chunk) -> Chunk:
            if chunk.buffer == "sendbuf":
                return Chunk("recvbuf", place * shard, (place + 1) * shard)
            return _spread(chunk, shard)

        yield from _moved(scatter.rounds(place), inside, 1, of_scatter)
        yield from _moved(across.rounds(node), outside, local, of_across)
        yield from _moved(gather.rounds(place), inside, 1, of_gather)

    return Schedule(
        "allreduce",
        f"hierarchical:local={local},intra={scatter.algorithm},inter={across.algorithm}",
        local * nodes,
        local * shard,
        scatter.workspace * shard,
        True,
        generate,
    )


def by_leaders(inside: Schedule, across: Schedule, broadcast: Schedule) -> Schedule:
    """All-reduce in each node, all-reduce of the nodes' first ranks, broadcast in each node.

    One rank of each node uses the network, for the whole buffer.

    Args:
        inside: an all-reduce of the ranks of a node.
        across: an all-reduce of one rank of each node.
        broadcast: a broadcast of the ranks of a node.
    """
    local, nodes = inside.size, across.size
    chunks = inside.chunks * across.chunks * broadcast.chunks

    def spread(schedule: Schedule, buffers: tuple[str, ...]) -> Where:
        """Chunks of one phase as ranges of chunks of the whole."""

        def where(chunk: Chunk) -> Chunk:
            wide = _spread(chunk, chunks // schedule.chunks)
            return wide._replace(buffer="recvbuf") if chunk.buffer in buffers else wide

        return where

    def generate(rank: int) -> Iterator[Round]:
        node, place = divmod(rank, local)
        yield from _moved(inside.rounds(place), node * local, 1, spread(inside, ()))
        if place == 0:
            yield from _moved(across.rounds(node), 0, local, spread(across, ("sendbuf",)))
        else:
            yield from [()] * sum(1 for _ in across.rounds(0))
        yield from _moved(broadcast.rounds(place), node * local, 1, spread(broadcast, ("sendbuf",)))

    return Schedule(
        "allreduce",
        f"leaders:local={local},intra={inside.algorithm},inter={across.algorithm}",
        local * nodes,
        chunks,
        0,
        inside.in_place,
        generate,
    )


def _spread(chunk: Chunk, factor: int, block: int = 0) -> Chunk:
    """Each chunk cut into ``factor``, counted from ``block``."""
    return Chunk(chunk.buffer, (block + chunk.start) * factor, (block + chunk.stop) * factor)


def _moved(rounds: Iterator[Round], first: int, stride: int, where: Where) -> Iterator[Round]:
    """The rounds of ranks 0, 1, 2 ... done by ``first``, ``first + stride`` ... on other chunks."""

    def there(chunk: Chunk) -> tuple[Chunk]:
        return (where(chunk),)

    def at(peer: int) -> int:
        return first + stride * peer

    for steps in rounds:
        yield tuple(moved for step in steps for moved in mapped(step, there, at))
