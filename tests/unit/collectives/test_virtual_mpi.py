"""Calls of MPI on virtual ranks: buffers, statuses, objects, and numbers of ranks."""

import pickle

import numpy as np
import pytest
from mpi4py import MPI

from collectives.analysis.topology import LinkCost, Topology
from collectives.virtual import VirtualCluster, here
from collectives.virtual.mpi import COMM_WORLD, NAMES
from collectives.virtual.requests import VirtualRequest


def run(size, program, **options):
    """Results of the ranks of ``program``; only messages take time."""
    network = Topology(LinkCost(2e-6, 1e-9))
    return VirtualCluster(size, network, measures=False, **options).run(program)


def test_what_names_no_rank_and_no_tag_is_refused():
    def program():
        for call in (
            lambda: COMM_WORLD.Send(np.zeros(9), -1 if MPI.PROC_NULL != -1 else -3),
            lambda: COMM_WORLD.Send(np.zeros(9), 1),
            lambda: COMM_WORLD.Irecv(np.zeros(9), 1),
            lambda: COMM_WORLD.Send(np.zeros(9), 0, tag=-7),
        ):
            with pytest.raises(MPI.Exception):
                call()
        for call in (COMM_WORLD.scatter, COMM_WORLD.alltoall):
            with pytest.raises(ValueError, match="expecting 1 items, got 2"):
                call([1, 2])
        status = MPI.Status()
        COMM_WORLD.Recv(np.zeros(9), MPI.PROC_NULL, status=status)
        return status.source, status.tag, status.Get_count(MPI.BYTE)

    assert run(1, program) == [(MPI.PROC_NULL, MPI.ANY_TAG, 0)]


def test_a_block_of_another_length_is_refused_and_not_repeated():
    def program():
        size = COMM_WORLD.size
        for call in (
            lambda: COMM_WORLD.Iallgather(np.ones(1, "u1"), np.zeros(8 * size, "u1")).Wait(),
            lambda: COMM_WORLD.Iallgatherv(np.ones(1, "u1"), np.zeros(8 * size, "u1")).Wait(),
            lambda: COMM_WORLD.Allreduce(np.ones(1, "u1"), np.zeros(8, "u1")),
        ):
            with pytest.raises(MPI.Exception):
                call()
        own = np.full(2 * size + 1, 1.0 + COMM_WORLD.rank)
        COMM_WORLD.Iallgather(MPI.IN_PLACE, [own, 2, 1, MPI.DOUBLE]).Wait()
        return own.tolist()

    assert run(2, program) == [[1, 1, 1, 2, 2], [2, 1, 1, 2, 2]]


def test_what_a_virtual_cluster_lacks_is_refused_with_its_reason():
    def program():
        for call, told in (
            (lambda: NAMES["Win"].Create(None), "no Win.Create: each rank has a node to itself"),
            (lambda: NAMES["File"].Open(COMM_WORLD, "x"), "no File.Open: .* open one in Python"),
            (lambda: COMM_WORLD.Create_intercomm(0, COMM_WORLD, 0), "it has messages, collectives"),
            (lambda: COMM_WORLD.Spawn("x"), "no Intracomm.Spawn: .* with mpiexec"),
            (lambda: COMM_WORLD.group.Range_incl([(0, 0, 1)]), "no Group.Range_incl"),
            (lambda: NAMES["_handleof"](COMM_WORLD), "no MPI._handleof: its objects are Python's"),
            (lambda: NAMES["COMM_NULL"].py2f(), "no Intracomm.py2f: its objects are Python's"),
            (lambda: NAMES["_sizeof"](NAMES["Comm"]), "no MPI._sizeof: .* in C knows; start"),
        ):
            with pytest.raises(NotImplementedError, match=told):
                call()
        with pytest.raises(AttributeError, match="Intracomm has no Alreduce"):
            COMM_WORLD.Alreduce()

    run(1, program)


def test_a_null_object_raises_the_error_of_mpi():
    none, one = NAMES["COMM_NULL"], bytearray(1)

    def program():
        made, freed = COMM_WORLD.Dup(), COMM_WORLD.Dup()
        made.Disconnect()
        freed.free()
        COMM_WORLD.free()
        assert not freed and COMM_WORLD
        for comm in (none, made, COMM_WORLD.Split(MPI.UNDEFINED), NAMES["Cartcomm"]()):
            for name, *given in (
                ("Get_rank",), ("Get_size",), ("Allreduce", one, one), ("bcast", 1), ("Ibarrier",),
                ("recv",), ("Create_cart", [1]), ("Is_inter",), ("Is_intra",), ("Get_topology",),
                ("Get_attr", MPI.TAG_UB), ("Free",), ("Compare", COMM_WORLD),
            ):  # fmt: skip
                with pytest.raises(MPI.Exception) as raised:
                    getattr(comm, name)(*given)
                assert raised.value.Get_error_class() == MPI.ERR_COMM
            comm.free()
            with pytest.raises(MPI.Exception):
                comm.is_topo  # noqa: B018
        for call in (NAMES["GROUP_NULL"].Get_size, NAMES["Prequest"]().Start):
            with pytest.raises(MPI.Exception, match=r"(?i)invalid (group|(mpi_)?request)"):
                call()
        with pytest.raises(MPI.Exception):
            NAMES["MESSAGE_NULL"].Recv(one)
        NAMES["REQUEST_NULL"].Wait()

    run(1, program)


def test_both_sides_of_a_short_ring_are_told_apart():
    """As MPI's standard says; Open MPI 5.0's nonblocking calls take one for the other."""

    def program():
        grid = COMM_WORLD.Create_cart([2, 1], [True, True])
        found = np.zeros(4)
        grid.Ineighbor_alltoall(10.0 * grid.rank + np.arange(4), found).Wait()
        return found.tolist(), grid.neighbor_alltoall(list(range(4)))

    sides = [[1, 0, 3, 2]] * 2
    assert run(2, program) == [([11, 10, 3, 2], sides[0]), ([1, 0, 13, 12], sides[1])]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_message_is_taken_by_its_tag(is_late):
    """Whether its receive or the message is posted first."""

    def program():
        here().compute(1.0 * (COMM_WORLD.rank == is_late))
        if COMM_WORLD.rank == 0:
            for tag in (1, 2):
                COMM_WORLD.send(10 * tag, 1, tag=tag)
            return None
        return VirtualRequest.waitall([COMM_WORLD.irecv(source=0, tag=tag) for tag in (2, 1)])

    assert run(2, program)[1] == [20, 10]


def test_a_communicator_has_names_attributes_and_infos_of_its_rank():
    def program():
        key = COMM_WORLD.Create_keyval(copy_fn=lambda comm, key, value: value + 1)
        COMM_WORLD.Set_attr(key, 10 * COMM_WORLD.rank)
        COMM_WORLD.name = f"world of {COMM_WORLD.rank}"
        COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
        made = COMM_WORLD.Dup(MPI.Info.Create({"one": "two"}))
        assert isinstance(made.Get_info(), MPI.Info)
        assert COMM_WORLD.Compare(made) == MPI.CONGRUENT
        assert COMM_WORLD.Compare(COMM_WORLD) == MPI.IDENT
        assert not made.Get_attr(MPI.TAG_UB) < 32767 and not made.Is_inter()
        assert COMM_WORLD.Get_parent() == NAMES["COMM_NULL"]
        found = COMM_WORLD.Get_attr(key), made.Get_attr(key), COMM_WORLD.Get_name()
        made.Free()
        with pytest.raises(ValueError, match="but a constant of MPI"):
            pickle.dumps(COMM_WORLD.Dup())
        assert pickle.loads(pickle.dumps(COMM_WORLD)) == COMM_WORLD
        return found

    assert run(2, program) == [(0, 1, "world of 0"), (10, 11, "world of 1")]


def test_groups_are_sets_in_order_and_no_rank_is_another():
    def program():
        whole = COMM_WORLD.Get_group()
        some, last = whole.Incl([2, 0]), whole.Excl([0, 1])
        assert some.Translate_ranks(None, whole) == [2, 0]
        wanted = [1, MPI.PROC_NULL, MPI.UNDEFINED]
        assert whole.Translate_ranks([0, MPI.PROC_NULL, 1], some) == wanted
        joined = [NAMES["Group"].Union(last, some), some.Intersection(last), some.Difference(last)]
        assert [one.handle for one in joined] == [(2, 0), (2,), (0,)]
        assert some.Compare(whole.Incl([0, 2])) == MPI.SIMILAR
        assert some.Compare(last) == MPI.UNEQUAL
        for wrong in (-1, 3):
            with pytest.raises(MPI.Exception):
                whole.Incl([wrong])
            for call in (COMM_WORLD.bcast, COMM_WORLD.gather, COMM_WORLD.reduce):
                with pytest.raises(MPI.Exception):
                    call(1, root=wrong)

    run(3, program)


def test_a_probe_of_no_process_does_not_wait():
    def program():
        status = MPI.Status()
        assert COMM_WORLD.Probe(MPI.PROC_NULL, status=status)
        assert status.source == MPI.PROC_NULL
        NAMES["Message"].Probe(COMM_WORLD, MPI.PROC_NULL).Recv(None, status)
        return status.source, status.Get_count(MPI.BYTE)

    assert run(1, program) == [(MPI.PROC_NULL, 0)]
