"""Every collective by every algorithm, on both kinds of memory, over real ranks."""

import hashlib

import numpy as np
import pytest
from mpi4py import MPI

from collectives.algorithms import names
from tests.cases import slow_case


@pytest.mark.parametrize("memory", ["numpy", "shared"])
@pytest.mark.parametrize("algorithm", [*names("allreduce"), "auto"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, slow_case(np.float64), np.complex128])
def test_replicas_are_bitwise_equal(comm, algorithm, dtype, memory):
    fractions = np.random.default_rng(comm.rank).random(1003) * 10.0 ** (comm.rank % 3)
    mine = (comm.empty if memory == "shared" else np.empty)(1003, dtype)
    mine[...] = fractions
    comm.Allreduce(MPI.IN_PLACE, mine, algorithm=algorithm)
    digests = comm.allgather(hashlib.blake2b(mine.tobytes()).hexdigest())
    assert set(digests) == {digests[0]}
    exact = np.sum(comm.allgather(fractions.astype(dtype).astype(np.complex128)), axis=0)
    assert np.allclose(mine, exact, rtol=2e-2 if dtype == np.float16 else 1e-5)


@pytest.mark.parametrize("algorithm", ["ring", "butterfly", "direct", "double_binary_tree"])
def test_maxloc(comm, algorithm):
    pair, result = np.zeros((2, 3), [("value", "f4"), ("rank", "i4")])
    pair["value"], pair["rank"] = [comm.rank, -comm.rank, 5], comm.rank
    given = [pair, 3, MPI.FLOAT_INT], [result, 3, MPI.FLOAT_INT]
    comm.Allreduce(*given, op=MPI.MAXLOC, algorithm=algorithm)
    assert result["value"].tolist() == [comm.size - 1, 0, 5]
    assert result["rank"].tolist() == [comm.size - 1, 0, 0]
