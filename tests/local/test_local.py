"""Real data through every algorithm, with all ranks in this process."""

from functools import partial
from itertools import cycle

import numpy as np
import pytest

from collectives.algorithms import ALGORITHMS, build
from collectives.algorithms.segments import segmented
from collectives.contracts import contract
from collectives.errors import InvalidBuffer
from collectives.execution.local import connect, run
from collectives.execution.messages import Operands, bind
from tests.cases import every_algorithm
from tests.local.references import reference

SIZES = (1, 2, 3, 4, 5, 7, 8)


def check(schedule, count, dtype, in_place, seed):
    """Runs whole numbers, which every type adds exactly, then fractions, which none does."""
    blocks = schedule.contract
    in_place = in_place and blocks.in_place is not None
    rng = np.random.default_rng(seed)
    members = [schedule.member(rank) for rank in range(schedule.size)]
    lengths = [count * blocks.send_blocks(member) for member in members]
    whole = [rng.integers(0, 10, n).astype(dtype) for n in lengths]
    kept = [original.copy() for original in whole]
    combine = np.maximum if blocks.idempotent else np.add
    expected = partial(reference, schedule.collective, root=schedule.root)
    for rank, output in enumerate(run(schedule, whole, combine, in_place=in_place)):
        wanted = np.max(kept, axis=0) if blocks.idempotent else expected(kept, rank)
        if wanted is not None:
            assert output.dtype == dtype
            assert np.array_equal(output, wanted)
    assert all(map(np.array_equal, whole, kept))
    if blocks.reduces and not blocks.idempotent:
        fractions = [rng.random(n).astype(dtype) for n in lengths]
        results = run(schedule, fractions, in_place=in_place)
        for rank, result in enumerate(results):
            exact = expected(fractions, rank)
            if exact is not None:
                assert np.allclose(result, exact, rtol=1e-2 if dtype == np.float16 else 1e-5)
            assert schedule.collective != "allreduce" or np.array_equal(result, results[0])


@every_algorithm
@pytest.mark.parametrize("in_place", [False, True])
def test_every_count_and_root(algorithm, in_place):
    """Also in segments, whose messages overlap or do not."""
    kinds = cycle([np.float32, np.float64, np.float16])
    for size in (*SIZES, 11):
        for root in range(size if contract(algorithm.collective).rooted else 1):
            schedule = algorithm.schedule(size, root)
            for count in (7,) if root else {0, 1, size - 1, size, 3 * size + 1}:
                check(schedule, count, next(kinds), in_place, seed=count)
        for overlap in (False, True):
            check(segmented(schedule, 3, overlap), 23, np.float64, in_place, seed=1)


def test_user_operations_reduce_in_rank_order():
    """2x2 matrices do not commute, so only the order of ranks gives the right product."""

    def multiply(left, right, *, out):
        out[...] = (left.reshape(-1, 2, 2) @ right.reshape(-1, 2, 2) % 97).reshape(-1)

    for algorithm in (a for a in ALGORITHMS if a.keeps_order and a.collective == "allreduce"):
        for size in SIZES:
            rng = np.random.default_rng(size)
            inputs = [rng.integers(0, 97, 4) for _ in range(size)]
            wanted = np.eye(2, dtype=int)
            for items in inputs:
                wanted = wanted @ items.reshape(2, 2) % 97
            schedule = algorithm.schedule(size)
            whole = [np.tile(items, schedule.chunks) for items in inputs]
            for output in run(schedule, whole, multiply):
                assert np.array_equal(output[:4].reshape(2, 2), wanted)


def test_sizes_that_do_not_fit():
    operands = Operands(np.zeros(1), np.zeros(4))
    with pytest.raises(InvalidBuffer, match="not a multiple of the 3 blocks"):
        bind(build("allgather", "ring", 3), connect(3)[0], operands, np.add)
