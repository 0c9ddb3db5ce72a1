"""Slots of ordinary arrays: drawn calls and plans in turns, and lives that end in between."""

import errno
import os
import random
from unittest.mock import Mock

import numpy as np
import pytest
from mpi4py import MPI

from collectives import CheckedTransport, CollectiveError, Communicator, MismatchError
from collectives.algorithms import ALGORITHMS
from collectives.calls import bind
from collectives.calls.arguments import Arguments
from collectives.calls.resources import Resources
from collectives.execution import slot_rounds
from collectives.execution.transport import shared_memory, slots
from collectives.execution.transport.mpi import MPITransport
from collectives.execution.transport.shared_memory import NodeMemory
from tests.cases import slow_case
from tests.mpi.collectives import forms
from tests.mpi.collectives.forms import FORMS, expect_sum, expect_well, run, total, tuned
from tests.mpi.collectives.test_drawn import Drawn, Pool

pytestmark = pytest.mark.mpi(min_size=2)
comm = pytest.fixture(forms.fresh)

SLOT = 512
NAMED = [one for one in ALGORITHMS if one.collective != "barrier"]


def drawn(comm, rng, own):
    """A call through slots, whose buffers lie anywhere."""
    algorithm = rng.choice(NAMED)
    call = Drawn(comm, Pool(None), algorithm.collective, algorithm.name, rng.randrange(1 << 30))
    nodes = ":local=1" if "local" in algorithm.options else ":"
    call.algorithm += nodes + rng.choice(["", "", ",segments=3"])

    def empty(size, dtype):
        start = own.randrange(70) * (dtype.char != "g")  # which has no view but an aligned one
        return np.zeros(size * dtype.itemsize + start, np.uint8)[start:].view(dtype)

    call.count %= 300  # of a few slots
    call.empty = empty
    call.make()
    return call


def pretend(monkeypatch, node):
    """From now on, ``node(rank)`` is the node of a rank."""

    class Pretended(MPI.Intracomm):
        def Split_type(self, kind):
            return self.Split(node(self.rank))

    monkeypatch.setattr(Resources, "comm", property(lambda self: Pretended(self.given)))


@pytest.mark.parametrize("local", [8, pytest.param(2, marks=pytest.mark.mpi(min_size=3))])
@pytest.mark.parametrize("seed", [1, *(slow_case(n) for n in (2, 3))])
def test_drawn_calls_and_plans_take_turns(monkeypatch, seed, local):
    pretend(monkeypatch, lambda rank: rank // local)
    for module in (slots, slot_rounds):
        monkeypatch.setattr(module, "SLOT_BYTES", SLOT)
    monkeypatch.setattr(bind, "SLOTS_FROM_BYTES", 1)
    rng, own = random.Random(seed), random.Random(seed + MPI.COMM_WORLD.rank)
    with Communicator(MPI.COMM_WORLD) as comm, comm.Dup() as other:
        for _ in range(60):
            plans = [drawn(rng.choice([comm, other]), rng, own) for _ in range(rng.randrange(4))]
            for one in plans:
                one.plan = getattr(one.comm, f"{one.method}_init")(*one.given, **one.how)
            for one in plans:
                one.plan.Start()
            drawn(rng.choice([comm, other]), rng, own).check()
            for one in own.sample(plans, len(plans)):
                one.plan.Wait()
                one.compare()
            for one in plans:
                one.plan.Free()


def test_a_plan_outlives_its_communicator():
    with Communicator(MPI.COMM_WORLD) as comm:
        items = np.zeros(100_000)
        plan = comm.plan(Arguments("allreduce", MPI.IN_PLACE, items, MPI.SUM), "ring")
    for turn in range(20):
        items[...] = MPI.COMM_WORLD.rank + turn
        plan.Start()
        plan.Wait()
        assert (items == total(MPI.COMM_WORLD) + turn * MPI.COMM_WORLD.size).all()


class Leaving(MPI.Intracomm):
    def Split(self, *given):
        super().Split(*given)
        raise KeyboardInterrupt


def allocate_and_leave(self, nbytes, allocate=NodeMemory.allocate):
    allocate(self, nbytes)
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("made", "patch"),
    [
        ("slots", (NodeMemory, "allocate", allocate_and_leave)),
        ("a communicator", (Resources, "comm", property(lambda self: Leaving(self.given)))),
    ],
)
def test_what_a_signal_left_as_it_was_made(comm, monkeypatch, made, patch):
    """One that comes on every rank, as MPI's calls let no handler run while they wait."""
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(*patch)
        comm.Allreduce(MPI.IN_PLACE, np.zeros(10_000), algorithm="ring")
    with pytest.raises(CollectiveError, match=f"making of {made}.* was left"):
        comm.Allreduce(MPI.IN_PLACE, np.zeros(10_000), algorithm="ring")
    expect_well(comm, "native")


@pytest.mark.parametrize("local", [8, pytest.param(2, marks=pytest.mark.mpi(min_size=3))])
def test_a_programs_file_is_not_taken_for_the_nodes_memory(comm, monkeypatch, tmp_path, local):
    """In another PID namespace, another file may have the path of rank 0's memory."""
    pretend(monkeypatch, lambda rank: rank // local)
    file, opened = tmp_path / "program's", os.open
    file.write_bytes(bytes(4 << 20))
    if comm.rank == 1:
        monkeypatch.setattr(os, "open", lambda path, flags: opened(file, flags))
    expect_well(comm)
    expect_sum(comm, np.zeros(10_000), "ring", plus=1)
    assert not any(file.read_bytes())


def test_a_python_that_was_built_for_an_older_c_library(comm, monkeypatch, through_slots):
    """As conda's and uv's: it lacks the function that makes anonymous files."""
    monkeypatch.delattr(os, "memfd_create")
    expect_sum(comm, np.zeros(10_000), "ring")
    expect_sum(comm, comm.empty(100), "ring")
    assert through_slots == ["ring"]


def test_a_rank_that_gets_no_more_files_says_so(comm, monkeypatch, caplog):
    refused = Mock(side_effect=OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    monkeypatch.setattr(shared_memory, "anonymous", refused)
    expect_sum(comm, np.zeros(10_000), "ring")
    told = "slots: rank 0: the ranks cannot share memory: rank 0: [Errno 24] Too many open files"
    assert caplog.messages == [f"messages instead of slots: {told}"]


def through(comm, collective, count, dtype=np.float64):
    """A call with blocks of ``count`` items."""
    sent = np.ones(count * comm.size, dtype)
    received = np.empty(count * (comm.size if collective == "Allreduce" else 1), dtype)
    getattr(comm, collective)(sent, received, algorithm="direct")


@pytest.mark.parametrize("collective", ["Allreduce", "Reduce_scatter_block"])
def test_ranks_whose_calls_differ_never_read_one_another_s_numbers(collective):
    world = MPI.COMM_WORLD
    last = world.rank == world.size - 1
    for other in ((100_001, np.float64), (100_000, np.int64), (50_000, np.float64)):
        with Communicator(world) as comm:
            through(comm, collective, 100_000)
            with pytest.raises(MismatchError, match=r"another call than this rank.s .* x "):
                through(comm, collective, *(other if last else (100_000,)))


@pytest.mark.parametrize("way", FORMS)
@pytest.mark.parametrize("items", [40, 5_000, 50_000])
@pytest.mark.parametrize("transport", [MPITransport, CheckedTransport])
def test_messages_of_another_length_raise(monkeypatch, transport, items, way):
    """MPI takes a shorter one without a word: here it follows one of the right length."""
    pretend(monkeypatch, lambda rank: rank)
    with Communicator(MPI.COMM_WORLD, transport=transport) as comm:
        last, sent = comm.size - 1, np.ones(items)
        received = np.zeros((comm.size, items)) if comm.rank == 0 else None
        told = rf"gather by direct .* rank 0 expects \d+ bytes from rank {last}, which sends "
        run(comm, way, "Gather", sent, received, algorithm="direct")
        if comm.rank == 0:
            with pytest.raises(MismatchError, match=told + str(8 * items - 8)[:-2]):
                run(comm, way, "Gather", sent, received, algorithm="direct")
        else:
            mine = sent[: items - (comm.rank == last)]
            run(comm, way, "Gather", mine, None, algorithm="direct")
    with Communicator(MPI.COMM_WORLD, transport=transport) as comm:
        sent = np.ones(10 + (comm.rank == last))
        if comm.rank == 0:
            with pytest.raises(MismatchError, match=told + "more"):
                run(comm, way, "Gather", sent, np.zeros(10 * comm.size), algorithm="direct")
        else:
            run(comm, way, "Gather", sent, None, algorithm="direct")


@pytest.fixture
def through_slots(monkeypatch):
    """The algorithms of the plans through slots that are bound."""
    found, bound = [], slot_rounds.bind_slots

    def told(schedule, *given):
        found.append(schedule.algorithm)
        return bound(schedule, *given)

    monkeypatch.setattr(slot_rounds, "bind_slots", told)
    return found


@pytest.mark.parametrize("dtype", [np.float16, np.int64, np.complex64])
@pytest.mark.parametrize("inter", ["ring", "butterfly"])
@pytest.mark.mpi(min_size=3)
def test_nodes_reduce_in_slots_meanwhile(monkeypatch, through_slots, dtype, inter):
    """Beside a sum in more digits; the last node of an odd number of ranks has one."""
    world = MPI.COMM_WORLD
    pretend(monkeypatch, lambda rank: rank // 2)
    for module in (slots, slot_rounds):
        monkeypatch.setattr(module, "SLOT_BYTES", 1 << 16)
    monkeypatch.setattr(bind, "SLOTS_FROM_BYTES", 1)
    algorithm = f"hierarchical:local={2 - world.size % 2},inter={inter},segments=4"
    digits = 0 if dtype is np.int64 else 4 * np.finfo(dtype).eps
    with Communicator(world) as comm:
        for count in (0, world.size - 1, 1001, 70_003):
            inputs = [np.random.default_rng(n).random(count) for n in range(world.size)]
            inputs = [(100 * one).astype(dtype) for one in inputs]
            results = [np.empty(count, dtype)]
            comm.Allreduce(inputs[world.rank], results[0], algorithm=algorithm)
            assert bool(through_slots) == bool(count)
            for form in FORMS:
                results.append(inputs[world.rank].copy())
                run(comm, form, "Allreduce", MPI.IN_PLACE, results[-1], algorithm=algorithm)
            assert results[0].tobytes() == results[1].tobytes()
            exact = np.sum(inputs, axis=0, dtype=np.complex128)
            for result in results:
                assert len({*world.allgather(result.tobytes())}) == 1
                np.testing.assert_allclose(result, exact, rtol=digits)


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("by_node", [True, False])
def test_auto_follows_nodes_of_as_many_ranks(monkeypatch, through_slots, tmp_path, by_node):
    size = MPI.COMM_WORLD.size
    pretend(monkeypatch, lambda rank: rank // 2 if by_node else rank % -(-size // 2))
    table = tuned(tmp_path, ("numpy", "hierarchical:local=2,segments=4", 0), per_node=2)
    items = np.full(30_000, 1.0)
    with Communicator(MPI.COMM_WORLD, tuning=table) as comm:
        comm.Allreduce(MPI.IN_PLACE, items)
        assert (items == size).all()
        if by_node and size % 2 == 0:
            assert comm.last_plan.algorithm.startswith("hierarchical:local=2")
            assert through_slots
        else:
            assert "in the table" in comm.last_plan.reason and "cannot" in comm.last_plan.reason
            assert comm.last_plan.algorithm == "native"
