"""Shared memory as on a processor that is not x86-64: the fenced road, with real ranks."""

from collections.abc import Iterator

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.execution.transport import shared_memory
from tests.mpi.collectives.forms import RANK, P


@pytest.fixture
def comm(monkeypatch) -> Iterator[Communicator]:
    monkeypatch.setattr(shared_memory.platform, "machine", lambda: "aarch64")
    with Communicator(MPI.COMM_WORLD) as made:
        yield made


@pytest.mark.quick_on(2, 3)
@pytest.mark.parametrize("algorithm", ["direct", "ring", "butterfly", "double_binary_tree"])
def test_sums_are_right_and_fences_are_made(comm, monkeypatch, algorithm):
    made = []
    real = shared_memory.Fences.__call__
    monkeypatch.setattr(shared_memory.Fences, "__call__", lambda own: (made.append(1), real(own)))
    mine, total = comm.empty(100_000), comm.empty(100_000)
    plan = comm.Allreduce_init(mine, total, algorithm=algorithm)
    wanted = P * np.arange(100_000) + P * (P - 1) / 2
    for turn in range(3):
        mine[:] = np.arange(100_000) + RANK + turn
        comm.Allreduce(mine, total, algorithm=algorithm)
        np.testing.assert_array_equal(total, wanted + turn * P)
        total[:] = 0
        before = len(made)
        plan.Start()
        while not plan.Test():
            pass
        assert P == 1 or len(made) > before + 1
        np.testing.assert_array_equal(total, wanted + turn * P)
    plan.Free()
