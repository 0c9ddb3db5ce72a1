"""Communicators that are made of ours, with a topology or without: ours, or mpi4py's own."""

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator


class Own(Communicator):
    """A program's own kind."""


def ended(made):
    """The communicator of a nonblocking call."""
    made[1].Wait()
    return made[0]


# Rings.


def grid(comm):
    return comm.Create_cart([comm.size], [True])


def graph(comm):
    size = comm.size
    edges = [(rank + step) % size for rank in range(size) for step in (-1, 1)]
    return comm.Create_graph([2 * (rank + 1) for rank in range(size)], edges)


def adjacent(comm):
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    return comm.Create_dist_graph_adjacent([left], [right])


def distributed(comm):
    return comm.Create_dist_graph([comm.rank], [1], [(comm.rank + 1) % comm.size])


KINDS = {
    grid: MPI.Cartcomm,
    graph: MPI.Graphcomm,
    adjacent: MPI.Distgraphcomm,
    distributed: MPI.Distgraphcomm,
}
every_kind = pytest.mark.parametrize("make", KINDS)


def reduces(comm):
    """Whether it is one of ours that works."""
    for items in (comm.empty(1000), np.zeros(10_000), np.zeros(3)):
        items[...] = comm.rank
        comm.Allreduce(MPI.IN_PLACE, items, algorithm="ring")
        if comm.last_plan.algorithm != "ring" or (items != sum(range(comm.size))).any():
            return False
    return isinstance(comm, Communicator)


@every_kind
@pytest.mark.parametrize("kind", [Communicator, Own])
def test_it_has_both_however_it_was_made(make, kind):
    with kind(MPI.COMM_WORLD) as comm:
        plain = make(MPI.COMM_WORLD)
        for made in (make(comm), kind(plain), kind.fromhandle(plain.handle)):
            assert isinstance(made, kind) and isinstance(made, KINDS[make])
            assert made.topology == plain.topology
            assert (made.inedges, made.outedges) == (plain.inedges, plain.outedges)
            assert reduces(made)
            made.close()
        plain.Free()


@every_kind
def test_what_is_made_of_it_has_a_topology_where_mpi_gives_it_one(make):
    with Communicator(MPI.COMM_WORLD, algorithm="ring") as comm:
        of = make(comm)
        for kept in (of.Dup(), of.Clone(), ended(of.Idup()), of.Dup_with_info(MPI.INFO_NULL)):
            assert isinstance(kept, KINDS[make]) and kept.inedges == of.inedges
            assert reduces(kept)
            kept.Free()
        for lost in (of.Split(), of.Create(of.group), of.Create_group(of.group)):
            assert type(lost) is Communicator and reduces(lost)
            lost.Free()
        for other, its in KINDS.items():
            made = other(of)
            assert isinstance(made, its) and made.outedges == other(MPI.COMM_WORLD).outedges
            made.Free()
        of.Free()


def test_parts_of_a_grid_are_grids():
    with Communicator(MPI.COMM_WORLD, reproducible=True) as comm:
        cart = comm.Create_cart([1, comm.size], [False, True], reorder=True)
        row, column = cart.Sub([False, True]), cart.Sub([True, False])
        assert (row.dims, column.dims) == ([comm.size], [1])
        for part in (row, column):
            assert isinstance(part, MPI.Cartcomm) and isinstance(part, Communicator)
            part.Allreduce(MPI.IN_PLACE, items := np.full(3, 0.1))
            assert part.last_plan.algorithm == "exact"
            assert (items == np.float64(0.1 * part.size)).all()
            part.Free()
        assert cart.coords == cart.Get_coords(cart.rank) == [0, cart.rank]
        cart.Free()


def test_a_halo_exchange_among_collectives():
    """Neighbourhood collectives end the plans that are under way, which other ranks wait for."""
    with Communicator(MPI.COMM_WORLD, timeout=60) as comm:
        cart = grid(comm)
        left, right = cart.Shift(0, 1)
        cells = np.full(4, float(cart.rank))
        cart.Sendrecv(cells[2:3], right, 0, cells[:1], left, 0)
        assert cells[0] == left
        total = np.ones(50_000)
        plan = cart.Iallreduce(MPI.IN_PLACE, total, algorithm="ring")
        if cart.rank:
            plan.Wait()
        found = np.zeros(2)
        cart.Neighbor_allgather(cells[3:], found)
        assert found.tolist() == [left, right]
        assert cart.neighbor_allgather(cart.rank) == [left, right]
        assert cart.neighbor_alltoall(["to left", "to right"]) == ["to right", "to left"]
        plan.Wait()
        assert (total == cart.size).all()
        cart.Free()


COMMUNICATORS = {make.__name__: make for make in KINDS} | {
    "Clone": lambda c: c.Clone(),
    "Dup": lambda c: c.Dup(),
    "Dup_with_info": lambda c: c.Dup_with_info(MPI.INFO_NULL),
    "Idup": lambda c: ended(c.Idup()),
    "Idup_with_info": lambda c: ended(c.Idup_with_info(MPI.INFO_NULL)),
    "Create": lambda c: c.Create(c.group),
    "Create_group": lambda c: c.Create_group(c.group),
    "Split": lambda c: c.Split(0, -c.rank),
    "Split_type": lambda c: c.Split_type(MPI.COMM_TYPE_SHARED),
    "Shrink": lambda c: c.Shrink(),
    "fromhandle": lambda c: type(c).fromhandle(c.Dup().handle),
    "f2py": lambda c: type(c).f2py(c.Dup().py2f()),
    "fromint": lambda c: type(c).fromint(c.Dup().toint()),
}
#: mpi4py's own come of these.
OTHERS = {
    "Create_intercomm": lambda c: c.Split(c.rank % 2).Create_intercomm(0, c, 1 - c.rank % 2),
    "Create_from_group": lambda c: type(c).Create_from_group(c.group),
    "Ishrink": lambda c: ended(c.Ishrink()),
    "Get_parent": lambda c: type(c).Get_parent(),
}


@pytest.fixture(scope="module")
def strict():
    with Communicator(MPI.COMM_WORLD, algorithm="ring", check=True) as made:
        yield made


@pytest.mark.mpi(min_size=2)
@pytest.mark.quick_on(2, 3)
@pytest.mark.parametrize("name", [*COMMUNICATORS, *OTHERS])
def test_what_is_made_of_ours_is_ours_or_mpi4pys(strict, name):
    try:
        made = (COMMUNICATORS | OTHERS)[name](strict)
    except (MPI.Exception, NotImplementedError):
        pytest.skip("this MPI has none")
    assert isinstance(made, Communicator) == (name in COMMUNICATORS)
    if name in COMMUNICATORS:
        handed_on = name not in ("fromhandle", "f2py", "fromint")
        assert not handed_on or made._engine.settings == strict._engine.resources.handed_on
        assert reduces(made)
        made.Free()
