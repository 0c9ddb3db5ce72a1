"""Virtual ranks: their numbers, their clock against the simulator's, and who waits for whom."""

import random
import sys
from functools import partial
from importlib.util import find_spec
from zlib import crc32

import numpy as np
import pytest
from mpi4py import MPI

from collectives.algorithms import build
from collectives.analysis.simulate import Machine, simulate
from collectives.analysis.topology import Cluster as Nodes
from collectives.analysis.topology import FatTree, LinkCost, Topology
from collectives.execution.messages import Operands, bind
from collectives.execution.transport.checked import CheckedTransport
from collectives.execution.transport.mpi import MPITransport
from collectives.virtual import Deadlock, VirtualCluster, here
from collectives.virtual.messages import BUFFER
from collectives.virtual.mpi import COMM_WORLD
from collectives.virtual.requests import VirtualRequest

PORT = LinkCost(2e-6, 1e-9)


class Transport(MPITransport):
    """Messages between virtual ranks, whose plans are run and not polled."""


#: A message that goes by rendezvous, and its seconds on a port.
LARGE = np.zeros(100_000, np.uint8)
SENT = LARGE.nbytes * PORT.beta


def run(size, program, network=None, **options):
    """The cluster, and what the ranks of ``program`` return; only messages take time."""
    cluster = VirtualCluster(size, network or Topology(PORT), measures=False, **options)
    return cluster, cluster.run(program)


@pytest.mark.parametrize("size", [2, 3, 8, 16])
@pytest.mark.parametrize(
    "network", [Topology(PORT), Nodes(PORT, per_node=4), FatTree(PORT, leaf=4)]
)
def test_a_ring_takes_the_time_of_the_simulator(size, network):
    count = 24 * size
    schedule = build("allreduce", "ring", size)

    def program():
        own = np.arange(count) * (COMM_WORLD.rank + 1.0)
        total = np.zeros(count)
        bind(schedule, Transport(COMM_WORLD), Operands(own, total, None), np.add)()
        return total

    for progress in (False, True):
        cluster, found = run(size, program, network, async_progress=progress)
        for total in found:
            np.testing.assert_array_equal(total, np.arange(count) * (size * (size + 1) / 2))
    expected = simulate(schedule, 8 * count, Machine(network, gamma=0.0))
    assert cluster.seconds == pytest.approx(expected, rel=1e-12)


def test_a_rank_draws_its_own_random_numbers():
    """As a process does, also where others run in between; unseeded, torch begins alike."""
    draws = [random.random, np.random.random]
    seeds = [random.seed, np.random.seed]
    if find_spec("torch"):
        import torch

        draws, seeds = [*draws, lambda: float(torch.rand(()))], [*seeds, torch.manual_seed]

    def drawn():
        COMM_WORLD.Barrier()
        return [draw() for draw in draws]

    def program():
        unseeded = drawn()
        for seed in seeds:
            seed(COMM_WORLD.rank)
        return unseeded, drawn(), drawn()

    _, each = run(3, program)
    assert each[0][0] == each[1][0] == each[2][0]
    for rank, (_, *found) in enumerate(each):
        for seed in seeds:
            seed(rank)
        assert found == [[draw() for draw in draws] for _ in range(2)]


def test_clocks_move_by_work_by_messages_and_by_waiting_for_the_last():
    def program():
        rank = here()
        if rank.number == 0:
            rank.compute(5.0)
            COMM_WORLD.Send(LARGE, 1)
        else:
            rank.compute(1.0)
            COMM_WORLD.Recv(LARGE.copy(), 0)
        return rank.now(), dict(rank.spent)

    sent = PORT.alpha + SENT
    _, ((first, own), (second, other)) = run(2, program, async_progress=True)
    assert first == second == pytest.approx(5.0 + sent)
    assert own == pytest.approx({"computing": 5.0, "communicating": sent, "waiting": 0.0})
    assert other == pytest.approx({"computing": 1.0, "communicating": sent, "waiting": 4.0})
    _, ((first, own), (second, other)) = run(2, program)
    assert second == pytest.approx(5.0 + sent)  # the sender's socket has it before
    assert other["waiting"] == pytest.approx(4.0, abs=PORT.alpha)
    assert first == sum(own.values()) < second == pytest.approx(sum(other.values()))


def test_all_ranks_do_the_work_of_a_sum(monkeypatch):
    cpu = [0.0]

    def add(*_):
        cpu[0] += 1.0

    def program():
        COMM_WORLD.Allreduce(np.ones(4), np.empty(4), own)
        here().now()
        return here().spent

    monkeypatch.setattr("collectives.virtual.rank.time.thread_time", lambda: cpu[0])
    own = MPI.Op.Create(add)
    for spent in VirtualCluster(4, Topology(PORT)).run(program):
        assert spent["computing"] == 0.0
        assert spent["communicating"] == pytest.approx(3 / 4, abs=1e-3)
    own.Free()


@pytest.mark.parametrize(
    ("messages", "call"),
    [
        (2 * 3 / 4, lambda: COMM_WORLD.Allreduce(LARGE, LARGE.copy())),
        (4, lambda: COMM_WORLD.Iallgather(LARGE, np.zeros(4 * LARGE.size, "u1")).Wait()),
        (4, lambda: COMM_WORLD.allgather(LARGE)),
        (4, lambda: COMM_WORLD.alltoall([LARGE.copy() for _ in range(4)])),
        (2, lambda: COMM_WORLD.reduce(LARGE)),
        (2, lambda: COMM_WORLD.exscan(LARGE)),
        (4, lambda: COMM_WORLD.allreduce(LARGE)),
        (1, lambda: COMM_WORLD.bcast(LARGE)),
        (4, lambda: COMM_WORLD.scatter([LARGE.copy() for _ in range(4)])),
    ],
)
def test_collectives_of_the_library_take_the_time_of_what_a_rank_moves(messages, call):
    cluster, _ = run(4, call)
    assert cluster.seconds == pytest.approx(2 * PORT.alpha + messages * SENT, rel=0.02)


READ = []


def read():
    READ.append(COMM_WORLD.rank)


class Counted:
    def __reduce__(self):
        return read, ()


def test_the_root_alone_reads_the_objects_that_it_gathers():
    READ.clear()
    run(4, lambda: COMM_WORLD.gather(Counted(), 2))
    assert READ == [2] * 4


def test_messages_share_the_port_of_their_receiver():
    def program():
        if COMM_WORLD.rank == 0:
            VirtualRequest.Waitall([COMM_WORLD.Irecv(LARGE.copy(), peer) for peer in (1, 2, 3)])
        else:
            COMM_WORLD.Send(LARGE, 0)
        return here().now()

    _, ends = run(4, program, async_progress=True)
    assert ends == pytest.approx([PORT.alpha + n * SENT for n in (3, 1, 2, 3)])
    _, ends = run(4, program)
    assert ends == pytest.approx([n * SENT for n in (3, 0, 1, 2)], abs=PORT.alpha)


@pytest.mark.parametrize("sender", [0, 1])
@pytest.mark.parametrize("progress", [False, True])
def test_a_large_message_begins_when_both_of_its_ranks_are_within_a_call(sender, progress):
    """One waits; the other posts, computes 3 s, looks, and computes on."""

    def program():
        rank = here()
        post = COMM_WORLD.Isend if rank.number == sender else COMM_WORLD.Irecv
        request = post(LARGE.copy(), 1 - rank.number)
        if rank.number == 0:
            rank.compute(3.0)
            request.Test()
            rank.compute(4.0)
        request.Wait()
        return rank.now()

    _, (first, second) = run(2, program, async_progress=progress)
    begin = 0.0 if progress else 3.0
    sent = PORT.alpha + SENT if progress or sender == 0 else 0.0  # a socket has it at once
    assert first == pytest.approx(7.0, abs=1e-6)
    assert second == pytest.approx(begin + sent, abs=PORT.alpha)


def test_a_socket_holds_so_much_of_a_message_while_its_sender_computes():
    def program():
        rank, message = here(), np.zeros(2 * BUFFER, np.uint8)
        if rank.number == 0:
            request = COMM_WORLD.Isend(message, 1)
            rank.sleep(PORT.alpha)
            assert not request.Test()
            rank.compute(3.0)
            request.Wait()
        else:
            COMM_WORLD.Recv(message, 0)
        return rank.now()

    assert run(2, program)[1] == pytest.approx([3.0, 3.0 + BUFFER * PORT.beta], abs=1e-5)
    ends = [3.0, 2 * BUFFER * PORT.beta]
    assert run(2, program, async_progress=True)[1] == pytest.approx(ends, abs=1e-5)


@pytest.mark.parametrize("is_behind", [False, True])
def test_a_large_message_does_not_overtake_a_small_one(is_behind):
    """Nor behind the bytes of another, which leave in less than the latency of the small one."""

    def program():
        if COMM_WORLD.rank == 0:
            first = [COMM_WORLD.Isend(LARGE, 1, 1)] if is_behind else []
            here().sleep(1.0)
            small = COMM_WORLD.Isend(np.zeros(1), 1)
            for message in first:
                message.Test()
            VirtualRequest.Waitall([*first, small, COMM_WORLD.Isend(LARGE, 1)])
            return None
        if is_behind:
            COMM_WORLD.Recv(LARGE.copy(), 0, 1)
        else:
            here().compute(3.0)
        statuses = [MPI.Status() for _ in range(2)]
        for status in statuses:
            COMM_WORLD.Recv(LARGE.copy(), 0, 0, status)
        return [status.Get_count() for status in statuses]

    _, (_, found) = run(2, program, Topology(LinkCost(1.0, 1e-9)))
    assert found == [8, LARGE.nbytes]


def test_a_small_message_leaves_with_its_post():
    def program():
        rank, small = here(), np.full(1000, COMM_WORLD.rank)
        if rank.number == 0:
            COMM_WORLD.Send(small, 1)
            small[:] = 7  # it is the sender's again
            rank.compute(3.0)
        else:
            rank.compute(1.0)
            COMM_WORLD.Recv(small, 0)
            assert not small.any()
        return rank.now()

    assert run(2, program)[1] == pytest.approx([3.0, 1.0])
    assert run(2, program, async_progress=True)[1] == pytest.approx([4.0, 1.0], abs=1e-4)


@pytest.mark.parametrize("nbytes", [0, 100, LARGE.nbytes])
def test_messages_carry_checksums(nbytes):
    """Bytes and their checksum lie in two places, and are one message."""
    given = np.random.default_rng(0).integers(256, size=nbytes, dtype=np.uint8)

    def program():
        data = given.copy() if COMM_WORLD.rank == 0 else np.zeros(nbytes, np.uint8)
        ends = CheckedTransport(COMM_WORLD)
        make = ends.recv_init if COMM_WORLD.rank else ends.send_init
        request = make(data, 1 - COMM_WORLD.rank, 0)
        request.Start()
        request.Wait()
        assert request.envelope.number[0] == crc32(given.data)
        return data

    _, found = run(2, program)
    np.testing.assert_array_equal(found[1], given)


def test_large_messages_of_two_ranks_take_turns():
    """Rank 0 sends two messages, and rank 1 one back when it has the first of them."""

    def program():
        if COMM_WORLD.rank == 0:
            back = COMM_WORLD.Irecv(LARGE.copy(), 1)
            VirtualRequest.Waitall([COMM_WORLD.Isend(LARGE, 1, tag) for tag in (1, 2)])
        else:
            first, second = (COMM_WORLD.Irecv(LARGE.copy(), 0, tag) for tag in (1, 2))
            first.Wait()
            back = COMM_WORLD.Isend(LARGE, 0)
            second.Wait()
        back.Wait()
        return here().now()

    for progress, messages in ((False, 3), (True, 2)):
        _, (end, _) = run(2, program, async_progress=progress)
        assert end == pytest.approx(messages * SENT, abs=3 * PORT.alpha)


def test_ranks_of_a_round_send_at_once_although_one_is_ahead():
    """Rank 1 knows of the message of rank 0 before it begins: a receive that it posted first would
    answer at once, and let the bytes of rank 0 leave before the answer to its own message."""

    def program():
        operands, small = Operands(None, np.zeros(200_000, np.uint8)), np.zeros(1)
        plan = bind(build("allreduce", "ring", 2), Transport(COMM_WORLD), operands, np.add)
        if COMM_WORLD.rank == 0:
            plan.Start()
            COMM_WORLD.Isend(small, 1, 9)
        else:
            COMM_WORLD.Recv(small, 0, 9)
            plan.Start()
        plan.Wait()
        return here().now()

    _, ends = run(2, program)
    assert ends == pytest.approx([2 * SENT, 2 * SENT], rel=0.05)


def test_ranks_that_both_send_first_hang_where_messages_are_large_or_all_wait():
    def program(post, message):
        post(message, 1 - COMM_WORLD.rank)
        COMM_WORLD.Recv(message.copy(), 1 - COMM_WORLD.rank)

    run(2, partial(program, COMM_WORLD.Send, LARGE[:1000]))
    for post, message, options in (
        (COMM_WORLD.Send, LARGE, {}),
        (COMM_WORLD.Ssend, LARGE[:1000], {}),
        (COMM_WORLD.Send, LARGE[:1000], {"async_progress": True}),
        (COMM_WORLD.Send, LARGE[:0], {"eager": 0}),
        (COMM_WORLD.Send, LARGE[:1000], {"eager": 999}),
    ):
        told = r"rank 1 sends to rank 0 \(tag 0\), and waits for rank 0"
        with pytest.raises(Deadlock, match=told):
            run(2, partial(program, post, message), **options)


def test_a_deadlock_says_who_waits_for_whom():
    def program():
        rank = COMM_WORLD.rank
        if rank < 2:
            COMM_WORLD.Recv(np.zeros(1), (rank + 1) % 2, tag=5)
        elif rank == 2:
            COMM_WORLD.ssend("too many", 0)
        else:
            COMM_WORLD.barrier()

    with pytest.raises(Deadlock) as told:
        run(5, program)
    text = str(told.value)
    assert "rank 0 receives from rank 1 (tag 5), and waits for rank 1, at " in text
    assert "rank 1 receives from rank 0 (tag 5), and waits for rank 0, at " in text
    assert "rank 2 sends to rank 0 (tag 0), and waits for rank 0, at " in text
    assert "rank 3 is in a barrier, and waits for ranks 0, 1, 2, at " in text
    assert f"{__file__}:" in text


@pytest.mark.parametrize(("looks", "pause"), [("Test", 0), ("Testall", 1e-3), ("Iprobe", 0)])
def test_ranks_that_look_for_what_cannot_come_are_told_as_if_they_waited(looks, pause):
    def program():
        rank = COMM_WORLD.rank
        if rank == 2:
            COMM_WORLD.Recv(np.zeros(1), 0, tag=9)
        request = COMM_WORLD.Irecv(np.zeros(1), 1 - rank, tag=5)
        look = {
            "Test": request.Test,
            "Testall": lambda: VirtualRequest.Testall([request]),
            "Iprobe": lambda: COMM_WORLD.Iprobe(1 - rank, tag=5),
        }[looks]
        while not look():
            here().sleep(pause)

    with pytest.raises(Deadlock) as told:
        run(3, program)
    assert "rank 0 receives from rank 1 (tag 5), and polls for rank 1, at " in str(told.value)
    assert "rank 2 receives from rank 0 (tag 9), and waits for rank 0, at " in str(told.value)


def test_a_rank_looks_until_a_late_message_comes():
    def program():
        if COMM_WORLD.rank:
            here().compute(0.02)
            COMM_WORLD.Send(LARGE, 0)
            return None
        request, looks = COMM_WORLD.Irecv(LARGE.copy(), 1), 0
        while not request.Test():
            looks += 1
        return looks

    assert run(2, program)[1][0] > 100_000


def test_a_deadlock_names_messages_that_nobody_takes():
    def program():
        if COMM_WORLD.rank:
            COMM_WORLD.send("other", 0, tag=6)
        else:
            COMM_WORLD.recv(source=1, tag=5)

    told = r"tag 5\), and waits for rank 1, at .*; there lies a message of rank 1 with tag 6"
    with pytest.raises(Deadlock, match=told):
        run(2, program)


def test_an_error_of_one_rank_ends_all():
    def program():
        if COMM_WORLD.rank == 2:
            raise ZeroDivisionError("mine")
        COMM_WORLD.barrier()

    with pytest.raises(ZeroDivisionError, match="mine") as raised:
        run(4, program)
    assert raised.value.__notes__ == ["on virtual rank 2 of 4"]


def test_ranks_that_come_to_different_collectives_are_told():
    def program():
        return COMM_WORLD.bcast(1) if COMM_WORLD.rank else COMM_WORLD.allgather(1)

    with pytest.raises(RuntimeError, match="rank 1 calls bcast from 0 where rank 0 has called al"):
        run(2, program)


def test_a_rank_that_exits_well_ends_no_other():
    def program():
        if COMM_WORLD.rank == 0:
            sys.exit(0)
        return COMM_WORLD.Split(0 if COMM_WORLD.rank else MPI.UNDEFINED)

    def ends():
        if COMM_WORLD.rank == 0:
            sys.exit(0)
        here().compute(1.0)
        return COMM_WORLD.rank

    assert run(3, ends)[1] == [None, 1, 2]
    with pytest.raises(Deadlock, match="rank 0 has ended"):
        run(3, program)
    with pytest.raises(SystemExit):
        run(3, lambda: sys.exit(COMM_WORLD.rank))
