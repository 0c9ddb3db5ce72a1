"""Hierarchical: algorithms within the nodes and algorithms across them, composed.

Ranks are numbered node by node, ``local`` of them on each.  With rings in both directions it is the
all-reduce of a 2-D torus (Ying et al.: "Image classification at supercomputer scale", 2018).
"""

from collections.abc import Callable, Iterator
from math import isqrt

from collectives.algorithms.registry import REGISTRY
from collectives.errors import UnknownAlgorithm
from collectives.schedule import Chunk, Round, Schedule, mapped

Where = Callable[[Chunk], Chunk]


def allreduce(size: int, local: int = 0, intra: str = "ring", inter: str = "ring") -> Schedule:
    """Reduce-scatter in each node, all-reduce of each shard across the nodes, all-gather in each.

    All ranks of a node use the network at once, each for its shard.  Cost: the sum of the three; a
    rank sends 1/local of the buffer over the network.

    Args:
        local: ranks of a node; 0: as many as nodes, as nearly as can be.
        intra: names the reduce-scatter and the all-gather.
        inter: names the all-reduce.
    """
    local, nodes = _split("hierarchical", size, local)
    scatter = REGISTRY.schedule("reduce_scatter", intra, local)
    gather = REGISTRY.schedule("allgather", intra, local)
    across = REGISTRY.schedule("allreduce", inter, nodes)
    for part in (across, gather):
        if part.workspace or not part.in_place:
            raise UnknownAlgorithm(f"hierarchical cannot use {part}: it needs memory of its own")
    shard = across.chunks

    def generate(rank: int) -> Iterator[Round]:
        node, place = divmod(rank, local)
        first = node * local  # rank of the node

        def of_scatter(chunk: Chunk) -> Chunk:
            return _spread(chunk, shard, place if chunk.buffer == "recvbuf" else 0)

        def of_across(chunk: Chunk) -> Chunk:
            own = place * shard
            return Chunk("recvbuf", own + chunk.start, own + chunk.stop)

        def of_gather(chunk: Chunk) -> Chunk:
            if chunk.buffer == "sendbuf":
                return Chunk("recvbuf", place * shard, (place + 1) * shard)
            return _spread(chunk, shard)

        yield from _moved(scatter.rounds(place), first, 1, of_scatter)
        yield from _moved(across.rounds(node), place, local, of_across)
        yield from _moved(gather.rounds(place), first, 1, of_gather)

    return Schedule(
        "allreduce",
        f"hierarchical:local={local},intra={scatter.algorithm},inter={across.algorithm}",
        size, chunks=local * shard, workspace=scatter.workspace * shard, in_place=True,
        generate=generate,
    )  # fmt: skip


def by_leaders(size: int, local: int = 0, intra: str = "ring", inter: str = "ring") -> Schedule:
    """All-reduce in each node, all-reduce of the nodes' first ranks, broadcast in each node.

    One rank of each node uses the network, for the whole buffer.  Arguments as of
    :func:`allreduce`; ``intra`` names an all-reduce, too.
    """
    local, nodes = _split("leaders", size, local)
    inside = REGISTRY.schedule("allreduce", intra, local)
    across = REGISTRY.schedule("allreduce", inter, nodes)
    broadcast = REGISTRY.schedule("broadcast", "binomial_tree", local)
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
        size, chunks=chunks, workspace=0, in_place=inside.in_place, generate=generate,
    )  # fmt: skip


def _split(name: str, size: int, local: int) -> tuple[int, int]:
    """Ranks of a node and nodes; without ``local``, as square as possible."""
    if local == 0:
        local = next(n for n in range(isqrt(size), 0, -1) if size % n == 0)
    if size % local:
        raise UnknownAlgorithm(f"{name}: {size} ranks are no whole number of nodes of {local}")
    return local, size // local


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
