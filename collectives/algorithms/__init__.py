"""The registry: every algorithm of every collective, one entry each.

To add an algorithm, write its generator in a file of its own and add an entry here; the verifier's
tests, ``python -m collectives list``, the benchmark and :class:`~collectives.Communicator` find it.
"""

import difflib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from collectives.algorithms import (
    binomial_tree,
    bruck,
    butterfly,
    chain,
    circulant,
    direct,
    double_binary_tree,
    pairwise,
    parameter_server,
    ring,
)
from collectives.contracts import CONTRACTS, contract
from collectives.errors import UnknownAlgorithm
from collectives.schedule import Copy, Round, Schedule, recvbuf, sendbuf
from collectives.segments import segmented


@dataclass(frozen=True)
class Algorithm:
    """An entry of the registry.

    Attributes:
        collective, name: what it is asked for by.
        rounds: the generator ``rounds(rank, size, **options)``.
        summary, reference: one line each, printed by ``python -m collectives list``.
        chunks: pieces into which it cuts a block, as a function of the size (and options).
        workspace: chunks of workspace, as a function of the size.
        keeps_order: reduces in rank order at every size, as operations that do not commute need.
        in_place: reads no chunk of ``sendbuf`` after its place in ``recvbuf`` has been written.
        uniform: every round moves equal messages over equal distances.

    The last three are claims that the tests check.
    """

    collective: str
    name: str
    rounds: Callable[..., Iterator[Round]]
    summary: str
    reference: str
    chunks: Callable[..., int] = lambda size: 1
    workspace: Callable[[int], int] = lambda size: 0
    keeps_order: bool = False
    in_place: bool = True
    uniform: bool = False

    @property
    def options(self) -> dict[str, int]:
        """Names and defaults of the generator's own parameters."""
        parameters = list(inspect.signature(self.rounds).parameters.values())[2:]
        return {parameter.name: parameter.default for parameter in parameters}

    def schedule(self, size: int, **options: int) -> Schedule:
        """The algorithm at ``size`` ranks.

        Raises:
            UnknownAlgorithm: for an option that it does not have or a value out of ``1..size``.
        """
        for key, value in options.items():
            if key not in self.options:
                known = ", ".join(self.options) or "none"
                raise UnknownAlgorithm(f"{self.name} has no option {key!r}; it has {known}")
            if not 1 <= value <= size:
                raise UnknownAlgorithm(
                    f"{self.name}: {key}={value} must lie in 1..{size}, the number of ranks"
                )
        spelled = ",".join(f"{key}={value}" for key, value in options.items())
        chunks = self.chunks(size, **options)
        generate = partial(self.rounds, size=size, **options)
        if size == 1:
            generate = partial(_alone, chunks)
        return Schedule(
            self.collective,
            f"{self.name}:{spelled}" if spelled else self.name,
            size,
            chunks,
            self.workspace(size),
            self.in_place,
            generate,
        )


def _alone(chunks: int, rank: int) -> Iterator[Round]:
    """On one rank every collective is a copy."""
    yield (Copy(recvbuf[0:chunks], sendbuf[0:chunks]),)


ALGORITHMS = (
    Algorithm(
        "allreduce",
        "ring",
        ring.allreduce,
        "reduce-scatter, then all-gather between neighbours; least data at any size",
        "Patarasuk & Yuan 2009",
        chunks=lambda size: size,
        uniform=True,
    ),
    Algorithm(
        "allreduce",
        "double_binary_tree",
        double_binary_tree.allreduce,
        "half of the buffer up and down each of two complementary trees",
        "Sanders, Speck & Traff 2009",
        chunks=lambda size: 2,
    ),
    Algorithm(
        "allreduce",
        "butterfly",
        butterfly.recursive_doubling,
        "recursive doubling: the whole buffer with rank XOR 2^k; fewest rounds",
        "Thakur, Rabenseifner & Gropp 2005",
        keeps_order=True,
    ),
    Algorithm(
        "allreduce",
        "halving_doubling",
        butterfly.halving_doubling,
        "butterfly of halves: log2 p rounds to reduce-scatter, log2 p to all-gather",
        "Rabenseifner & Traff 2004",
        chunks=butterfly.chunks,
        keeps_order=True,
    ),
    Algorithm(
        "allreduce",
        "circulant",
        circulant.allreduce,
        "the ring's volume in 2 ceil(log2 p) rounds, for any number of ranks",
        "Traff 2024",
        chunks=lambda size: size,
    ),
    Algorithm(
        "allreduce",
        "binomial_tree",
        binomial_tree.allreduce,
        "reduce to rank 0 and broadcast from it along one tree",
        "Thakur, Rabenseifner & Gropp 2005",
        keeps_order=True,
    ),
    Algorithm(
        "allreduce",
        "parameter_server",
        parameter_server.allreduce,
        "push to one server and pull from it; servers=k shards the buffer over k of them",
        "Li et al. 2014",
        chunks=lambda size, servers=1: servers,
    ),
    Algorithm(
        "allreduce",
        "direct",
        direct.allreduce,
        "one hop between all pairs: rank r reduces chunk r and sends it to everybody",
        "the textbook's 2(L + T'/P)",
        chunks=lambda size: size,
        keeps_order=True,
    ),
    Algorithm(
        "reduce_scatter",
        "ring",
        ring.reduce_scatter,
        "partial sums travel once round the ring",
        "Patarasuk & Yuan 2009",
        workspace=lambda size: 2,
        in_place=False,
        uniform=True,
    ),
    Algorithm(
        "reduce_scatter",
        "circulant",
        circulant.reduce_scatter,
        "the ring's volume in ceil(log2 p) rounds, for any number of ranks",
        "Traff 2024",
        workspace=lambda size: size,
        in_place=False,
    ),
    Algorithm(
        "reduce_scatter",
        "direct",
        direct.reduce_scatter,
        "one hop between all pairs: rank r reduces block r of everybody",
        "one hop",
        keeps_order=True,
        in_place=False,
    ),
    Algorithm(
        "allgather",
        "ring",
        ring.allgather,
        "every block travels once round the ring",
        "Thakur, Rabenseifner & Gropp 2005",
        uniform=True,
    ),
    Algorithm(
        "allgather",
        "recursive_doubling",
        butterfly.allgather,
        "the blocks held double in every round",
        "Thakur, Rabenseifner & Gropp 2005",
    ),
    Algorithm(
        "allgather",
        "bruck",
        bruck.allgather,
        "doubling at distances 2^k, for any number of ranks, and one rotation",
        "Bruck et al. 1997",
        workspace=lambda size: size,
    ),
    Algorithm(
        "allgather",
        "circulant",
        circulant.allgather,
        "the blocks nearly double in every round, for any number of ranks",
        "Traff 2024",
    ),
    Algorithm(
        "allgather",
        "direct",
        direct.allgather,
        "every rank sends its block to everybody at once",
        "one hop",
    ),
    Algorithm(
        "alltoall",
        "pairwise",
        pairwise.alltoall,
        "in round d, send to rank+d and receive from rank-d",
        "Thakur, Rabenseifner & Gropp 2005",
        in_place=False,
    ),
    Algorithm(
        "alltoall",
        "bruck",
        bruck.alltoall,
        "ceil(log2 p) rounds of p/2 packed blocks; for small blocks",
        "Bruck et al. 1997",
        workspace=bruck.alltoall_workspace,
    ),
    Algorithm(
        "alltoall",
        "linear",
        direct.alltoall,
        "everything posted at once",
        "one hop",
        in_place=False,
    ),
    Algorithm(
        "broadcast",
        "binomial_tree",
        binomial_tree.broadcast,
        "the ranks that have it double in every round",
        "Thakur, Rabenseifner & Gropp 2005",
    ),
    Algorithm(
        "broadcast",
        "chain",
        chain.broadcast,
        "from each rank to the next; with segments, a pipeline",
        "Worringen 2003",
    ),
    Algorithm(
        "broadcast",
        "double_binary_tree",
        double_binary_tree.broadcast,
        "half of the buffer down each of two complementary trees; with segments, full bandwidth",
        "Sanders, Speck & Traff 2009",
        chunks=lambda size: 2,
    ),
)


def names(collective: str) -> list[str]:
    """Names of the algorithms of ``collective``; raises :class:`UnknownAlgorithm`."""
    contract(collective)
    return [a.name for a in ALGORITHMS if a.collective == collective]


def find(collective: str, name: str) -> Algorithm:
    """The entry for ``name``; raises :class:`UnknownAlgorithm` with the nearest name."""
    known = names(collective)
    for algorithm in ALGORITHMS:
        if (algorithm.collective, algorithm.name) == (collective, name):
            return algorithm
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
    raise UnknownAlgorithm(f"no {collective} algorithm {name!r}; {hint}")


def parse(text: str) -> tuple[str, dict[str, int]]:
    """``"parameter_server:servers=2"`` -> ``("parameter_server", {"servers": 2})``."""
    name, _, rest = text.partition(":")
    options = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals or not value.strip().isdecimal():
            raise UnknownAlgorithm(
                f"cannot read {item!r} in {text!r}; write name:option=number,option=number"
            )
        options[key.strip()] = int(value)
    return name.strip(), options


def build(collective: str, algorithm: str, size: int) -> Schedule:
    """The schedule for an algorithm as a user spells it, with its options.

    Every algorithm has the option ``segments``: as many overlapping slices of the buffers.

    >>> build("allreduce", "parameter_server:servers=2", 8).chunks
    2
    """
    name, options = parse(algorithm)
    segments = options.pop("segments", 1)
    if segments < 1:
        raise UnknownAlgorithm(f"{algorithm}: there is at least one segment")
    return segmented(find(collective, name).schedule(size, **options), segments, overlap=True)


__all__ = ["ALGORITHMS", "CONTRACTS", "Algorithm", "build", "find", "names", "parse"]
