"""Sums of gradients that do not wait for the last ones: what is in them, and that nobody hangs."""

from time import sleep

import numpy as np
import pytest
from mpi4py import MPI
from msgspec.structs import replace

from collectives import Communicator
from mpitrain.config import Sync
from mpitrain.step.agreement import StepReport
from mpitrain.sync.quorum import Quorum
from tests.mpi.mpitrain.layouts import curve, equal, in_folder, mlp
from tests.mpi.mpitrain.test_sync_arithmetic import gradient, workers

pytestmark = [pytest.mark.mpi, pytest.mark.at_most(5)]

RANKS = MPI.COMM_WORLD.size
#: A step waits for the gradients of all workers, or of all but one.
ALL, BUT_ONE = (Sync("quorum", quorum=part) for part in (1.0, (RANKS - 1) / RANKS or 1.0))


class Gradient:
    """Knows no more of gradients than their squares."""

    def __init__(self, gradients):
        self.gradients = gradients

    def own_squares(self):
        return float(self.gradients @ self.gradients)

    def used(self):
        return frozenset()


def sums(comm, quorum, steps, gradient_of, before=lambda step: None):
    """The sum of each step, what was taken, and whether this rank had computed."""
    own, found = quorum.workers.gradients, []
    for step in range(steps):
        before(step)
        computed = quorum.computes(step)
        own[...] = gradient_of(comm.rank, step) if computed else np.nan
        quorum.progress()
        agreed = quorum.agree(step, Gradient(own), StepReport(float(comm.rank + 1)))
        quorum.after_step(step)
        found.append((own.copy(), quorum.taken, computed, agreed))
    return found


def drawn(worker, step):
    return np.random.default_rng([worker, step]).standard_normal(12).astype(np.float32)


def test_a_quorum_of_all_is_the_sum_at_a_parameter_server_bit_by_bit(comm):
    quorum = Quorum(workers(comm, np.float32), ALL)
    everyone = [(step, comm.size * ((step + 1,),)) for step in range(6)]
    for (step, all_taken), (total, taken, computed, agreed) in zip(
        everyone, sums(comm, quorum, 6, drawn), strict=True
    ):
        expected = drawn(comm.rank, step)
        comm.Allreduce(MPI.IN_PLACE, expected, algorithm="parameter_server")
        np.testing.assert_array_equal(total, expected)
        assert taken == all_taken and computed
        assert agreed.loss == comm.size * (comm.size + 1) / 2
        assert agreed.grad_norm == pytest.approx(np.linalg.norm(expected))
    quorum.quiesce()
    quorum.close()


@pytest.mark.mpi(min_size=2)
def test_who_is_late_is_not_waited_for_and_nothing_of_it_is_lost(comm):
    """The last worker begins to send its first gradient when rank 0 has done three steps."""
    last = comm.size - 1
    quorum = Quorum(workers(comm), BUT_ONE)
    told = comm.Dup()

    def before(step):
        if comm.rank == 0 and step == 3:
            told.send("go on", last)

    def late(worker, step):
        if step == 0:
            told.Barrier()  # all of them have begun
        if worker == last and step == 0:
            assert told.recv(source=0) == "go on"
        return gradient(comm, worker, step)

    found = sums(comm, quorum, 8, late, before)
    every = comm.allgather([taken for _, taken, _, _ in found])
    assert all(taken == every[0] for taken in every)
    for total, taken, _, _ in found:
        parts = [gradient(comm, w, s - 1) for w, steps in enumerate(taken) for s in steps]
        assert len(parts) >= last
        np.testing.assert_allclose(total, sum(parts) * (comm.size / len(parts)), rtol=1e-14)
    assert found[0][1][last] == found[1][1][last] == found[2][1][last] == ()
    # Each gradient that was computed is in one sum, or waits at rank 0.
    computed = comm.allgather({step for step, one in enumerate(found, 1) if one[2]})
    quorum.quiesce()
    waiting = quorum.state()["quorum.late"][:, 0]
    for worker in range(comm.size):
        taken = [s for _, one, _, _ in found for s in one[worker]]
        assert len(taken) == len(set(taken)) and set(taken) <= computed[worker]
        assert len(computed[worker]) - len(taken) == waiting[worker]
    assert comm.size == 2 or 1 in computed[last]
    quorum.close()
    told.Free()


@pytest.mark.mpi(min_size=2)
def test_the_others_wait_for_who_is_far_behind(comm):
    last, behind = comm.size - 1, 2
    quorum = Quorum(workers(comm), replace(BUT_ONE, behind=behind))
    done = comm.Dup()
    ahead, sent = -1, []

    def slowly(worker, step):
        nonlocal ahead
        if step == 0:
            done.Barrier()
        if worker == last and step == 0:
            sleep(0.5)
            while done.Iprobe(source=0):
                ahead = max(ahead, done.recv(source=0))
        elif worker == 0 and step:
            sent.append(done.isend(step - 1, last))
        return gradient(comm, worker, step)

    sums(comm, quorum, 9, slowly)
    if comm.rank == last:
        assert ahead <= behind + 1
        while done.recv(source=0) < 7:
            pass
    for request in sent:
        request.wait()
    quorum.quiesce()
    quorum.close()
    done.Free()


def quorum_job(folder, **sync):
    return in_folder(mlp("float32"), folder, log_every=1000, sync={"kind": "quorum", **sync})


def test_a_quorum_of_all_trains_as_a_parameter_server_does(comm, folder):
    expected_curve, expected = curve(comm, mlp("float32", algorithm="parameter_server"), 6)
    found_curve, found = curve(comm, quorum_job(folder, quorum=1.0), 6)
    np.testing.assert_allclose(found_curve, expected_curve, rtol=1e-6)
    equal(found, expected)


def test_results_that_nobody_waits_for_take_no_memory(comm):
    """As many as ``behind`` allows would be more than there is."""
    with Communicator(comm) as own:
        quorum = Quorum(workers(own), replace(ALL, behind=2**31 - 1))
        sums(own, quorum, 6, drawn)
        assert len(quorum._results) <= 6
        quorum.quiesce()
        quorum.close()


def slow_last(parts):
    """The last rank takes its time in some steps."""
    if parts.comm.rank == parts.comm.size - 1 and parts.steps_done % 4 == 1:
        sleep(0.05)
