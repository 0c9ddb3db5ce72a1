"""Checks of where ranks run: nodes, cores."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mpi4py import MPI
from threadpoolctl import threadpool_info  # type: ignore[import-untyped]

from mpitrain.doctor.finding import Finding, in_parts, leader, ok, runs_of, warn

#: Most nodes that the finding lists; all are judged.
_SHOWN = 8


class Place(NamedTuple):
    """Where a rank is.

    Attributes:
        node: the lowest rank on it; host names of containers may be equal on different nodes.
    """

    node: int
    host: str


class Cores(NamedTuple):
    """The cores that a rank may run on, and the threads of its BLAS."""

    node: int
    host: str
    affinity: frozenset[int]
    threads: int


def ranks(comm: MPI.Intracomm, folder: Path) -> Finding:
    """Nodes with their ranks; local ranks count in this order."""

    def place(node: int) -> Place:
        return Place(node, socket.gethostname())

    return in_parts(comm, "ranks", [lambda _: leader(comm), place], judge_ranks)


def judge_ranks(found: list[Place]) -> Finding:
    nodes: dict[int, list[int]] = {}
    for rank, place in enumerate(found):
        nodes.setdefault(place.node, []).append(rank)
    shown = []
    for node, own in list(nodes.items())[:_SHOWN]:
        word = "rank" if len(own) == 1 else "ranks"
        shown.append(f"{found[node].host}: {word} {runs_of(own)}")
    if len(nodes) > _SHOWN:
        shown.append(f"and {len(nodes) - _SHOWN} more nodes")
    text = "; ".join(shown)
    if len({len(own) for own in nodes.values()}) > 1:
        return warn(
            text,
            "start as many ranks on every node (--ntasks-per-node), as hierarchical algorithms "
            "want",
        )
    return ok(text)


def cores(comm: MPI.Intracomm, folder: Path) -> Finding:
    """Cores of each rank against the ranks and threads that want them."""

    def local(node: int) -> Cores:
        pools = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
        affinity = frozenset(os.sched_getaffinity(0))
        return Cores(node, socket.gethostname(), affinity, max(pools, default=1))

    return in_parts(comm, "cores", [lambda _: leader(comm), local], judge_cores)


def judge_cores(found: list[Cores]) -> Finding:
    """Judge that no core has to serve two ranks, nor two threads of BLAS."""
    for node in dict.fromkeys(own.node for own in found):
        here = [own for own in found if own.node == node]
        crowded = _crowded([own.affinity for own in here])
        if crowded:
            count, where = crowded
            return warn(
                f"{count} ranks on {_cores(where)} of {here[0].host}",
                "start no more ranks than cores, and bind each to cores of its own "
                "(--bind-to core, --cpus-per-task); polling ranks take turns otherwise",
            )
        everywhere = frozenset[int]().union(*(own.affinity for own in here))
        if sum(own.threads for own in here) > len(everywhere):
            return warn(
                f"{len(here)} ranks of {max(own.threads for own in here)} BLAS threads on "
                f"{_cores(everywhere)} of {here[0].host}",
                "set OMP_NUM_THREADS to cores per rank; the trainer limits its own",
            )
    fewest = min(len(own.affinity) for own in found)
    threads = sorted({own.threads for own in found})
    counts = f"{threads[0]}" if len(threads) == 1 else f"{threads[0]} to {threads[-1]}"
    plural = "" if counts == "1" else "s"
    return ok(f"each rank may use {fewest} or more, with {counts} BLAS thread{plural}")


def _crowded(affinities: Sequence[frozenset[int]]) -> tuple[int, frozenset[int]] | None:
    """Cores to which more ranks are confined than there are cores, if any (Hall's condition).

    Looks at each rank's set and at all of them together, which is exact for sets that nest or are
    disjoint, as launchers make them.
    """
    everywhere = frozenset[int]().union(*affinities)
    for cores_of_one in sorted({*affinities, everywhere}, key=len):
        confined = sum(own <= cores_of_one for own in affinities)
        if confined > len(cores_of_one):
            return confined, cores_of_one
    return None


def _cores(numbers: frozenset[int]) -> str:
    word = "core" if len(numbers) == 1 else "cores"
    return f"the {len(numbers)} {word} {runs_of(sorted(numbers))}"
