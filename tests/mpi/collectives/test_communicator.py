"""The communicator as a drop-in: buffers, plans, operations, errors, and the rest of mpi4py."""

import gc
import pickle
import re
import weakref
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from mpi4py import MPI

from collectives import (
    CheckedTransport,
    Communicator,
    InvalidBuffer,
    MismatchError,
    UnknownAlgorithm,
    delayed,
)
from collectives.algorithms import ALGORITHMS
from collectives.calls.choice import Situation, choose
from collectives.calls.native import library
from collectives.calls.tables import load
from tests.mpi.collectives.forms import expect_sum, expect_well, total


def test_counts_and_displacements(comm):
    sendbuf, recvbuf = np.full(10, comm.rank, "f4"), np.full(10, -1.0, "f4")
    comm.Allreduce([sendbuf, 4, MPI.FLOAT], [recvbuf, (4, 3), MPI.FLOAT], algorithm="ring")
    assert recvbuf.tolist() == [-1] * 3 + [total(comm)] * 4 + [-1] * 3
    blocks = np.zeros(5 * comm.size, "f4")
    comm.Allgather([sendbuf, 2, MPI.FLOAT], [blocks, 2, MPI.FLOAT], algorithm="ring")
    assert blocks[: 2 * comm.size].tolist() == np.repeat(np.arange(comm.size), 2).tolist()
    assert not blocks[2 * comm.size :].any()


#: Faults of buffers, and of numbers without such an operation.
BAD = {
    "not contiguous": lambda: (np.zeros(10)[::2], np.zeros(5)),
    "read-only": lambda: (np.zeros(3), np.frombuffer(bytes(24))),
    "both must have the same type": lambda: (np.zeros(3, "f4"), np.zeros(3)),
    "is a derived type, the receive buffer float64": lambda: (
        [np.zeros(4), 2, MPI.DOUBLE.Create_contiguous(2).Commit()],
        np.zeros(4),
    ),
    "has 2 items, but 3 go with": lambda: (np.zeros(2), np.zeros(3)),
    "holds 3 items, but 5 were asked for": lambda: (np.zeros(3), [np.zeros(3), 5, MPI.DOUBLE]),
    "items of derived types": lambda: (None, [np.zeros(4), 1, MPI.DOUBLE.Create_contiguous(4)]),
    "no whole number": lambda: (None, [np.zeros(3, "u1"), MPI.DOUBLE]),
    "Python objects": lambda: (None, np.array([object()])),
    "is a list|1 to 4 parts": lambda: (None, [1, 2, 3, 4, 5]),
    "is a dict": lambda: (None, {}),
    "gives no access": lambda: (None, pytest.importorskip("torch").ones(3, requires_grad=True)),
    r"on \|?complex64": lambda: (None, np.zeros(4, "c8"), MPI.MAX),
    r"on \|?float32": lambda: (None, np.zeros(4, "f4"), MPI.BAND),
    "MPI defines no MAXLOC on MPI_DOUBLE": lambda: (None, np.zeros(20_000), MPI.MAXLOC),
    r"on \|?bool": lambda: (None, np.zeros(4, bool)),
    r"on \|?V8": lambda: (None, np.zeros(4, "V8")),
}


@pytest.mark.parametrize("sentence", BAD)
def test_buffers_that_cannot_be_used(comm, sentence):
    sendbuf, *given = BAD[sentence]()
    with pytest.raises(InvalidBuffer, match=sentence):
        comm.Allreduce(MPI.IN_PLACE if sendbuf is None else sendbuf, *given, algorithm="ring")


def test_roots_that_do_not_exist(comm):
    with pytest.raises(InvalidBuffer, match="is not one of the"):
        comm.Bcast(np.zeros(3), comm.size, algorithm="chain")


ORDERED = [a.name for a in ALGORITHMS if a.keeps_order and a.collective == "allreduce"]
PRIME = 10007


def compose(left, right, datatype=None):
    """Maps x -> a x + b modulo a prime, as a * PRIME + b: associative, but the order matters."""
    then = np.frombuffer(right, np.int64)
    (a, b), (c, d) = divmod(np.frombuffer(left, np.int64), PRIME), divmod(then, PRIME)
    then[:] = a * c % PRIME * PRIME + (b * c + d) % PRIME


@pytest.mark.parametrize("items", [9, 50_000])
@pytest.mark.parametrize("algorithm", ["native", "auto", *ORDERED])
def test_operations_that_do_not_commute(comm, algorithm, items):
    op = MPI.Op.Create(compose, commute=False)
    mine = np.random.default_rng(comm.rank).integers(0, PRIME**2, items)
    expected, *others = comm.allgather(mine)
    for after in others:
        compose(expected, after)
        expected = after
    result = np.zeros_like(mine)
    comm.Allreduce(mine, result, op=op, algorithm=algorithm)
    assert np.array_equal(result, expected)
    # It may take numbers in groups, as means with their counts, which ours would cut anywhere.
    assert algorithm != "auto" or comm.last_plan.algorithm == "native"
    with pytest.raises(UnknownAlgorithm, match="does not keep rank order"):
        comm.Allreduce(mine, result, op=op, algorithm="ring")
    plan = comm.Allreduce_init(mine, result, op=op, algorithm=algorithm)
    for _ in range(2):
        result[...] = 0
        plan.Start()
        plan.Wait()
        assert np.array_equal(result, expected)
    plan.Free()
    op.Free()


def test_attributes_are_the_callers_own():
    """Ours is no copy of the communicator, whose attributes would be copied with it."""
    told = []
    key = MPI.Comm.Create_keyval(
        lambda comm, key, value: told.append("copied"), lambda *_: told.append("deleted")
    )
    with Communicator(MPI.COMM_WORLD) as world:
        made = world.Dup()
        made.Set_attr(key, 1)
        made.Allreduce(MPI.IN_PLACE, np.ones(100), algorithm="ring")
        assert not told
        made.Free()
        assert told == ["deleted"]
    MPI.Comm.Free_keyval(key)


@pytest.mark.parametrize("algorithm", ["ring", "native"])
def test_calls_keep_no_array_alive(comm, algorithm):
    items = np.zeros(1000)
    gone = weakref.ref(items)
    comm.Allreduce(MPI.IN_PLACE, items, algorithm=algorithm)
    comm.Iallreduce(MPI.IN_PLACE, items, algorithm=algorithm).Wait()
    comm.Allreduce(MPI.IN_PLACE, np.zeros(1), algorithm="ring")
    del items
    gc.collect()
    assert gone() is None


def test_the_plan_says_what_ran_and_why(comm):
    items = np.zeros(3)
    comm.Allreduce(MPI.IN_PLACE, items, algorithm="parameter_server:servers=1")
    assert comm.last_plan.algorithm == "parameter_server:servers=1"
    assert comm.last_plan.reason == "asked for"
    comm.Allreduce(MPI.IN_PLACE, items)
    situation = Situation(library(), "allreduce", items.nbytes, comm.size, comm.size)
    assert comm.last_plan.algorithm == choose(load(), situation).algorithm
    assert "measured" in comm.last_plan.reason


@pytest.mark.parametrize("method", ["allreduce", "Clone", "Dup", "Split", "Create", "close"])
def test_the_watchdog_sees_plans_that_a_method_ends_first(monkeypatch, method):
    comm = Communicator(MPI.COMM_SELF, timeout=100)
    engine, watchdog, waits = comm._engine, comm._engine.watchdog, []
    drain = engine.progress.drain

    def draining():
        waits.append((watchdog.calls.current and watchdog.calls.current.what[0], watchdog._stop))
        drain()

    monkeypatch.setattr(engine.progress, "drain", draining)
    made = getattr(comm, method)(*{"allreduce": [1], "Create": [comm.group]}.get(method, []))
    assert waits and all(what and method.lower() in what for what, _ in waits)
    assert not any(stopped for _, stopped in waits)
    for one in (made, comm):
        if isinstance(one, Communicator):
            one.close()
    assert watchdog._stop and not watchdog._thread.is_alive()


def test_a_node_that_does_not_share_memory(monkeypatch):
    """One rank's failure makes it ordinary memory on all, and everything else goes on."""
    with Communicator(MPI.COMM_WORLD) as comm:
        if comm.rank == comm.size - 1:
            refuse = Mock(side_effect=PermissionError("not in this container"))
            monkeypatch.setattr("collectives.execution.transport.shared_memory.Mapping", refuse)
        expect_sum(comm, comm.empty(5000, float), "direct")
        assert "shared" not in comm.last_plan.reason


@pytest.mark.parametrize("cores", ["one", "each its own"])
def test_ranks_that_share_cores_yield_them(monkeypatch, cores):
    """However many the machine has."""
    own = {0} if cores == "one" else {MPI.COMM_WORLD.rank}
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: own)
    with Communicator(MPI.COMM_WORLD) as comm:
        comm.empty(3)
        polite = cores == "one" and comm.size > 1
        assert comm._engine.resources.node._polite == polite


def test_memory_that_one_rank_lacks_is_an_error_of_that_kind_on_all(caplog):
    caplog.set_level("INFO", "collectives")
    with Communicator(MPI.COMM_WORLD, transport=CheckedTransport) as comm:
        alone = comm.rank == comm.size - 1
        with pytest.raises(MemoryError, match=f"rank {comm.size - 1}: Unable to allocate"):
            comm.empty(1 << 55 if alone else 1)
        comm.empty(1)
    assert caplog.messages == ["ordinary memory instead of shared: messages have checksums"]


def blocks(comm, odd):
    return [np.zeros(8 * comm.size), [2 + odd, *[2] * (comm.size - 1)]]


#: Calls of which the last rank's is odd.
DIFFERENT = {
    "count": lambda c, odd: c.Allreduce(MPI.IN_PLACE, np.zeros(4 + odd)),
    "type": lambda c, odd: c.Allreduce(MPI.IN_PLACE, np.zeros(4, "f4" if odd else "i4")),
    "operation": lambda c, odd: c.Allreduce(MPI.IN_PLACE, np.zeros(4), MPI.MAX if odd else MPI.SUM),
    "algorithm": lambda c, odd: c.Allreduce(
        MPI.IN_PLACE, np.zeros(4), algorithm="ring" if odd else "direct"
    ),
    "collective": lambda c, odd: (c.Alltoall if odd else c.Allreduce)(
        MPI.IN_PLACE, np.zeros(c.size)
    ),
    "layout": lambda c, odd: c.Allreduce(MPI.IN_PLACE, np.zeros(8)[:: 1 + odd]),
    "plan": lambda c, odd: c.Allreduce_init(MPI.IN_PLACE, np.zeros(4 + odd)),
    "as a plan": lambda c, odd: (c.Ibcast if odd else c.Bcast)(np.ones(2)),
    "root None|root 0": lambda c, odd: c.Bcast(np.ones(2), None if odd else 0),
    "no operation": lambda c, odd: c.Allreduce(np.ones(2), np.zeros(2), "sum" if odd else MPI.SUM),
    "commute": lambda c, odd: c.Allreduce(
        np.ones(2), np.zeros(2), MPI.Op.Create(lambda a, b, kind: None, commute=not odd)
    ),
    "counts do not": lambda c, odd: c.Allgatherv(np.ones(2), blocks(c, odd), algorithm="ring"),
    "for rank": lambda c, odd: c.Alltoallv(blocks(c, 0), blocks(c, odd)),
}


#: Names that are part of the sentence.
SAID = ("as a plan", "root None|root 0", "no operation", "commute", "counts do not", "for rank")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("what", DIFFERENT)
def test_checking_finds_calls_that_do_not_belong_together(what):
    with Communicator(MPI.COMM_WORLD, check=True) as comm:
        odd = comm.rank == comm.size - 1
        with pytest.raises(MismatchError) as told:
            DIFFERENT[what](comm, odd)
        expect_well(comm)
    words = what if what in SAID else f"rank {comm.size - 1}: (a|the)"
    assert re.search(words, str(told.value)), told.value
    if what == "count":
        assert re.match(
            r"the ranks' calls do not belong together \(number 1 of this communicator\): ranks? 0",
            str(told.value),
        )
        assert f"(at {Path(__file__).name}:" in str(told.value)


@pytest.mark.parametrize(
    ("setting", "error", "sentence"),
    [
        ({"check": "0"}, TypeError, "check='0' must be True or False, or None"),
        ({"reproducible": "yes"}, TypeError, "reproducible='yes' must be True or False"),
        ({"reproducible": True, "algorithm": "ring"}, ValueError, "does not go with algorithm='r"),
        ({"timeout": "60"}, TypeError, "timeout='60' must be a number of seconds"),
        ({"timeout": True}, TypeError, "timeout=True must be a number of seconds"),
        ({"timeout": -1}, ValueError, "must be a finite number above 0"),
        ({"transport": "checked"}, TypeError, "transport='checked' must be MPITransport"),
        ({"transport": dict}, TypeError, "must be MPITransport, CheckedTransport or a subclass"),
        ({"tuning": 3}, TypeError, "tuning=3 must be a file's name or Path"),
        ({"device": ["auto"]}, ValueError, "is none of auto, direct and staged"),
        ({"algorithm": ["ring"]}, UnknownAlgorithm, "is of type list; give a name, as in 'ring'"),
    ],
)
def test_settings_of_other_types_are_refused_when_the_communicator_is_made(
    setting, error, sentence
):
    with pytest.raises(error, match=sentence):
        Communicator(MPI.COMM_WORLD, **setting)


def test_a_communicator_is_pickled_with_its_settings():
    with Communicator(MPI.COMM_WORLD, algorithm="ring", reproducible=False) as comm:
        again = pickle.loads(pickle.dumps(comm))
        assert again == comm
        expect_well(again, None)
        assert again.last_plan.algorithm == "ring"
        again.close()
        with Communicator(comm, transport=delayed("latency=1us")) as late:
            again = pickle.loads(pickle.dumps(late))
            assert again.delays_messages and again._engine.settings == late._engine.settings
            again.close()
        twin = comm.Dup()
        with pytest.raises(ValueError, match="cannot serialize"):
            pickle.dumps(twin)
        expect_well(twin, None)
        for _ in range(2):
            twin.free()  # mpi4py's safe one
            assert not twin
