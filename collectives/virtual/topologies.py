"""Grids and graphs of virtual ranks, and the collectives of neighbours."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from itertools import compress, pairwise
from typing import Any

import numpy as np
from mpi4py import MPI as library

from collectives.virtual.buffers import blocks, memory
from collectives.virtual.communicator import Intracomm
from collectives.virtual.point_to_point import pickled
from collectives.virtual.rank import Operation
from collectives.virtual.requests import UNDEFINED, VirtualRequest, forms


def _parts(of: Callable[[Any], Any], number: int) -> Any:
    """Properties: the parts of what ``of`` gives."""
    return [property(partial(lambda n, self: of(self)[n], n)) for n in range(number)]


class Topocomm(Intracomm):
    """A communicator whose ranks have neighbours.

    Attributes:
        inoutedges: the neighbours that this rank receives from, and those that it sends to.
        layout: its grid or graph, in the words of its class.
    """

    twist = 0
    inoutedges: Any
    layout = property(lambda self: self.handle.topology[self.rank])
    degrees = property(lambda self: tuple(map(len, self.inoutedges)))
    inedges, outedges = _parts(lambda self: self.inoutedges, 2)
    indegree, outdegree = _parts(lambda self: self.degrees, 2)

    @classmethod
    def on(cls, comm: Intracomm, layout: Any, color: Any = 0) -> Any:
        """The ranks of ``comm`` that give this colour, in this layout."""
        made = cls.of(Intracomm.Split(comm, color, comm.rank).held)
        if made:
            made.handle.topology[made.rank] = layout
        return made

    def neighbor_allgather(self, sendobj: Any) -> list[Any]:
        return self.neighbor_alltoall([sendobj] * self.outdegree)

    def neighbor_alltoall(self, sendobj: list[Any]) -> list[Any]:
        sources, targets = self.inoutedges
        sent, into = [pickled(one) for one in sendobj], [None] * len(sources)
        begun = self._exchange(sent, targets, into, sources, self.twist)
        found = VirtualRequest.waitall(begun.plan)
        return [found[number ^ self.twist] for number in range(len(sources))]


def _among_neighbours(name: str) -> Callable[..., Operation]:
    """A function that begins the collective of this name."""
    form = name.removeprefix("allgather").removeprefix("alltoall")

    def begin(self: Topocomm, sendbuf: Any, recvbuf: Any) -> Operation:
        sources, targets = self.inoutedges
        if name.startswith("allgather"):
            sent = [memory(sendbuf)] * len(targets)
        else:
            sent = blocks(sendbuf, len(targets), form)
        into = blocks(recvbuf, len(sources), form, writes=True)
        return self._exchange(sent, targets, into, sources, self.twist)

    return begin


for _name in ("allgather", "allgatherv", "alltoall", "alltoallv", "alltoallw"):
    _names = f"Neighbor_{_name}", f"Ineighbor_{_name}", f"Neighbor_{_name}_init"
    for _form in zip(_names, forms(_among_neighbours(_name)), strict=True):
        setattr(Topocomm, *_form)


class Cartcomm(Topocomm):
    """A grid, in which ranks count along the last dimension first; its layout is the lengths of
    the dimensions, and whether each is a ring."""

    theirs, kind, twist = library.Cartcomm, library.CART, 1
    dims, periods, coords = _parts(lambda self: self.topo, 3)
    topo = property(lambda self: self.Get_topo())
    dim = ndim = property(lambda self: len(self.layout[0]))

    @property
    def inoutedges(self) -> Any:
        sides = [side for along in range(self.ndim) for side in self.Shift(along, 1)]
        return sides, list(sides)

    def Get_topo(self) -> tuple[list[int], list[int], list[int]]:
        dims, periods = self.layout
        return list(dims), list(periods), self.Get_coords(self.rank)

    def Get_coords(self, rank: int) -> list[int]:
        if not 0 <= rank < self.size:
            raise library.Exception(library.ERR_RANK)
        return [int(place) for place in np.unravel_index(rank, self.layout[0])]

    def Get_cart_rank(self, coords: Sequence[int]) -> int:
        modes: Any = ["wrap" if ring else "raise" for ring in self.layout[1]]
        try:
            return int(np.ravel_multi_index(coords, self.layout[0], modes))
        except ValueError:
            raise library.Exception(library.ERR_ARG) from None

    def Shift(self, direction: int, disp: int) -> tuple[int, int]:
        return self._beside(direction, -disp), self._beside(direction, disp)

    def _beside(self, direction: int, disp: int) -> int:
        coords = self.coords
        if not 0 <= direction < len(coords):
            raise library.Exception(library.ERR_DIMS)
        coords[direction] += disp
        try:
            return self.Get_cart_rank(coords)
        except library.Exception:  # behind the border
            return library.PROC_NULL

    def Sub(self, remain_dims: Sequence[bool]) -> Any:
        dropped = [place for place, kept in zip(self.coords, remain_dims, strict=True) if not kept]
        layout = [[*compress(lengths, remain_dims)] for lengths in self.layout]
        return Cartcomm.on(self, layout, tuple(dropped))


class Graphcomm(Topocomm):
    """A graph that all ranks know; its layout is that of ``Create_graph``."""

    theirs, kind = library.Graphcomm, library.GRAPH
    topo = property(lambda self: tuple(map(list, self.layout)))
    dims = property(lambda self: tuple(map(len, self.layout)))
    index, edges = _parts(lambda self: self.topo, 2)
    nnodes, nedges = _parts(lambda self: self.dims, 2)
    neighbors = property(lambda self: self.Get_neighbors(self.rank))
    nneighbors = property(lambda self: len(self.neighbors))
    inoutedges = property(lambda self: (self.neighbors, self.neighbors))

    def Get_neighbors(self, rank: int) -> list[int]:
        first, last = list(pairwise([0, *self.index]))[rank]
        return self.edges[first:last]

    def Get_neighbors_count(self, rank: int) -> int:
        return len(self.Get_neighbors(rank))


class Distgraphcomm(Topocomm):
    """A graph of which a rank knows its own edges; its layout is their sources, their targets and
    their weights."""

    theirs, kind = library.Distgraphcomm, library.DIST_GRAPH
    inoutedges = property(lambda self: self.Get_dist_neighbors()[:2])

    def Get_dist_neighbors(self) -> Any:
        return deepcopy(self.layout)

    def Get_dist_neighbors_count(self) -> Any:
        return (*self.degrees, self.layout[2] is not None)


def create_cart(self: Any, dims: Any, periods: Any = None, reorder: bool = False) -> Any:
    if (ranks := int(np.prod(dims))) > self.size:
        raise library.Exception(library.ERR_ARG)
    given = np.array(False if periods is None else periods, bool)
    rings = np.broadcast_to(given, len(dims)).astype(int).tolist()
    return Cartcomm.on(self, ([*map(int, dims)], rings), 0 if self.rank < ranks else UNDEFINED)


def create_graph(self: Any, index: Any, edges: Any, reorder: bool = False) -> Any:
    if len(index) > 1 and index[0] == 0 and index[-1] == len(edges):
        index = index[1:]  # mpi4py takes these, too
    return Graphcomm.on(self, ([*index], [*edges]), 0 if self.rank < len(index) else UNDEFINED)


def create_dist_graph_adjacent(
    self: Any,
    sources: Any,
    destinations: Any,
    sourceweights: Any = None,
    destweights: Any = None,
    info: Any = None,
    reorder: bool = False,
) -> Any:
    edges = [[] if ends is None else [*map(int, ends)] for ends in (sources, destinations)]
    if sourceweights is None or sourceweights is library.UNWEIGHTED:
        return Distgraphcomm.on(self, (*edges, None))
    pairs = zip((sourceweights, destweights), edges, strict=True)
    return Distgraphcomm.on(
        self, (*edges, tuple([*map(int, own)] if ends else [] for own, ends in pairs))
    )


def create_dist_graph(
    self: Any,
    sources: Any,
    degrees: Any,
    destinations: Any,
    weights: Any = None,
    info: Any = None,
    reorder: bool = False,
) -> Any:
    weighs = weights is not None and weights is not library.UNWEIGHTED
    given = np.repeat(sources, degrees).tolist(), destinations, weights if weighs else destinations
    every = [edge for part in self.allgather([*zip(*given, strict=True)]) for edge in part]
    into = [(source, weight) for source, end, weight in every if end == self.rank]
    out = [(end, weight) for source, end, weight in every if source == self.rank]
    ends, heavy = zip(
        *([*zip(*edges, strict=True)] or [(), ()] for edges in (into, out)), strict=True
    )
    return create_dist_graph_adjacent(self, *ends, *(heavy if weighs else ()))
