"""Sums of codes on real ranks, against the same arithmetic on lists of vectors."""

from unittest.mock import Mock

import numpy as np
import pytest
from mpi4py import MPI

from collectives import CollectiveError, Communicator
from collectives.codec import Dice, Residual, shards
from collectives.coded import Coding, TwoPhase
from tests.mpi.collectives.forms import expect_well

pytestmark = pytest.mark.quick_on(3)
LENGTHS = (0, 1, 3, 8, 257)


class Steps:
    """Whole multiples of ``unit``, at most so many, one byte each: a code of one's own."""

    unbiased = False

    def __init__(self, unit=0.25, most=127):
        self.unit, self.most = unit, most

    def __str__(self):
        return "steps"

    def nbytes(self, n):
        return 4 + n

    def encode(self, x, code, draw):
        code[:4] = np.array([len(x)], np.int32).view(np.uint8)
        code[4:].view(np.int8)[...] = np.clip(np.rint(x / self.unit), -self.most, self.most)

    def decode(self, code, x):
        assert int(code[:4].view(np.int32)[0]) == len(x), "the code of another shard"
        x[...] = code[4:].view(np.int8) * self.unit


class Coin(Steps):
    """Rounds up or down by dice."""

    unbiased = True

    def encode(self, x, code, draw):
        super().encode(self.unit * np.floor(x / self.unit + draw().random(x.shape)), code, draw)


def round_trip(codec, x, draw=None):
    code, back = np.empty(codec.nbytes(x.size), np.uint8), np.empty_like(x)
    codec.encode(x, code, draw)
    codec.decode(code, back)
    return back


def given(rank, n, dtype=np.float64):
    return np.random.default_rng([3, rank]).normal(size=n).astype(dtype)


def summed(comm, n, dtype=np.float64, place=0):
    every = (given(rank + place, n, dtype) for rank in range(comm.size))
    return np.sum([round_trip(Steps(), one) for one in every], axis=0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", LENGTHS)
def test_two_phases_decode_add_in_rank_order_and_decode_again(comm, n, dtype):
    own, total = given(comm.rank, n, dtype), np.empty(n, dtype)
    codec = Steps()
    plan = TwoPhase(comm, Coding(codec), own, total)
    before = own.copy()
    for _ in range(2):
        plan.Start()
        plan.Wait()
        assert np.array_equal(total, round_trip(codec, summed(comm, n, dtype)).astype(dtype))
    assert np.array_equal(own, before)
    assert plan.sent == 2 * (comm.size - 1) * codec.nbytes(shards(n, comm.size)[0])
    plan.Free()


@pytest.mark.parametrize("n", LENGTHS)
def test_the_first_phase_alone_is_a_reduce_scatter(comm, n):
    counts = [n if rank == comm.size - 1 else 0 for rank in range(comm.size)]
    for lengths in (counts, shards(n, comm.size)):
        own, total = given(comm.rank, n), np.empty(lengths[comm.rank])
        plan = TwoPhase(comm, Coding(Steps()), own, total, lengths)
        plan.Start()
        while not plan.Test():
            pass
        start = sum(lengths[: comm.rank])
        assert np.array_equal(total, summed(comm, n)[start : start + total.size])
        plan.Free()


def test_what_was_sent_and_what_is_left_add_up_bit_by_bit(comm):
    """Quarters and a grid of ones: every sum is exact; those of several ranks are too large."""
    n, steps = 37, 60
    left, total = Residual(np.zeros(n)), np.empty(n)
    server = Residual(np.zeros(shards(n, comm.size)[comm.rank]))
    own = np.empty(n)
    plan = TwoPhase(comm, Coding(Steps(1.0, 3), left, server), own, total)
    rng, sums = np.random.default_rng([5, comm.rank]), np.zeros((2, n))
    for step in range(steps):
        own[...] = rng.integers(-9, 10, n) / 4
        before = own.copy()
        plan.Start()
        plan.Wait()
        if step % 7 == 3:  # the step is skipped: nothing has happened
            left.rollback()
            server.rollback()
            continue
        left.commit()
        server.commit()
        sums += before, total
    given_all = np.sum(comm.allgather(sums[0]), axis=0)
    kept_all = np.sum(comm.allgather(left.value), axis=0)
    kept_all += np.concatenate(comm.allgather(server.value))
    assert np.array_equal(given_all, sums[1] + kept_all)
    assert np.abs(kept_all).max() > 0
    plan.Free()


def test_dice_are_the_step_s_and_the_rank_s(comm):
    totals = []
    for step in (4, 5, 4):
        own, total = given(comm.rank, 64), np.empty(64)
        plan = TwoPhase(comm, Coding(Coin(), dice=Dice(1, comm.rank, step), place=2), own, total)
        plan.Start()
        plan.Wait()
        plan.Free()
        totals.append(total)
        assert len(set(comm.allgather(total.tobytes()))) == 1, "not the same on all ranks"
    assert np.array_equal(totals[0], totals[2])
    assert not np.array_equal(totals[0], totals[1])


def test_sums_under_way_at_once_may_end_in_any_order(comm):
    plans, totals = [], []
    for place in range(4):
        own, total = given(comm.rank + 10 * place, 50, np.float32), np.empty(50, np.float32)
        plans.append(TwoPhase(comm, Coding(Steps(), place=place), own, total))
        totals.append(total)
    for plan in plans:
        plan.Start()
    if comm.size > 1:  # alone, a plan is complete when it has started
        with pytest.raises(RuntimeError, match="started twice"):
            plans[0].Start()
    order = np.random.default_rng([1, comm.rank]).permutation(4).tolist()
    while order:
        order = [at for at in order if not plans[at].Test()]
    for place, total in enumerate(totals):
        assert np.array_equal(total, round_trip(Steps(), summed(comm, 50, np.float32, 10 * place)))
        plans[place].Free()


def test_a_sum_that_was_left_in_the_middle_says_so(comm):
    """On every rank here; never as a sum that is complete."""
    own, total, codec = given(comm.rank, 40), np.zeros(40), Steps()
    with Communicator(MPI.COMM_WORLD) as other:
        plan = TwoPhase(other, Coding(codec), own, total)
        codec.decode = Mock(side_effect=FloatingPointError)
        with pytest.raises(FloatingPointError):
            plan.Start()
            plan.Wait()
        for again in (plan.Test, plan.Wait, plan.Start):
            with pytest.raises(CollectiveError, match="left in the middle"):
                again()
    # Other communicators' collectives do not stumble over it.
    assert comm.allreduce(1) == comm.size
    expect_well(comm)
    assert not total.any()


@pytest.mark.parametrize("between", ["native", "ring", "empty", "barrier"])
def test_other_collectives_may_come_between_start_and_wait(comm, between):
    """Ranks come to them in other phases; none waits for one that waits for it."""
    own, total = given(comm.rank, 5000), np.empty(5000)
    plan = TwoPhase(comm, Coding(Steps()), own, total)
    for turn in range(3):
        plan.Start()
        if comm.rank == turn % comm.size:
            for _ in range(2000):
                plan.Test()
        if between == "empty":
            comm.empty(7, np.float64)
        elif between == "barrier":
            comm.barrier()
        else:
            expect_well(comm, between)
        plan.Wait()
        assert np.array_equal(total, round_trip(Steps(), summed(comm, 5000)))
    plan.Free()
