"""CuPy arrays over real ranks, which may share one GPU: mpirun -n 2 python -m pytest --with-mpi
-m mpi tests/gpu.  They skip where there is no GPU."""

import hashlib

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.algorithms import names

cupy = pytest.importorskip("cupy", reason="no CuPy")
pytestmark = pytest.mark.mpi


def gpus():
    try:
        return cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


if not gpus():
    pytest.skip("no GPU", allow_module_level=True)


@pytest.fixture(scope="module", params=["staged", "auto"])
def comm(request):
    cupy.cuda.Device(MPI.COMM_WORLD.rank % gpus()).use()
    with Communicator(MPI.COMM_WORLD, device=request.param) as communicator:
        yield communicator


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("algorithm", [*names("allreduce"), "auto"])
def test_every_all_reduce(comm, algorithm, in_place):
    for count in (0, 1, comm.size + 1, 100_000):
        for dtype in (np.int32, np.float16, np.float32, np.float64, np.complex64):
            mine = (cupy.arange(count) % 7 + comm.rank).astype(dtype)
            result = mine.copy() if in_place else cupy.full_like(mine, 99)
            comm.Allreduce(MPI.IN_PLACE if in_place else mine, result, algorithm=algorithm)
            total = comm.size * (np.arange(count) % 7) + comm.size * (comm.size - 1) // 2
            assert np.array_equal(cupy.asnumpy(result), total.astype(dtype))


@pytest.mark.parametrize("algorithm", ["ring", "butterfly", "direct", "circulant"])
def test_replicas_are_bitwise_equal(comm, algorithm):
    items = cupy.random.default_rng(comm.rank).random(10_001).astype(np.float32)
    comm.Allreduce(MPI.IN_PLACE, items, algorithm=algorithm)
    digests = comm.allgather(hashlib.blake2b(cupy.asnumpy(items).tobytes()).digest())
    assert len(set(digests)) == 1


def test_offsets_and_views(comm):
    pool = cupy.zeros(10_000, np.float32)
    view = pool[123:5123]
    view[...] = comm.rank
    comm.Allreduce(MPI.IN_PLACE, view, algorithm="ring")
    assert bool((view == comm.size * (comm.size - 1) // 2).all())
    assert not bool(pool[:123].any()) and not bool(pool[5123:].any())


def test_the_stream_is_waited_for(comm):
    """A kernel that takes long writes the input right before."""
    slow = cupy.ones((4000, 4000), np.float32)
    for turn in range(5):
        for _ in range(10):
            slow = slow @ slow
            slow /= slow.max()
        items = slow[0, :1000] * (comm.rank + turn + 1)
        comm.Allreduce(MPI.IN_PLACE, items, algorithm="ring")
        total = comm.size * (turn + 1) + comm.size * (comm.size - 1) // 2
        assert cupy.allclose(items, slow[0, :1000] * total)


@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [(c, a) for c in ("allgather", "alltoall") for a in (*names(c), "auto")],
)
def test_gathering_and_exchanging(comm, collective, algorithm):
    blocks = comm.size if collective == "alltoall" else 1
    mine = cupy.arange(5 * blocks) + 1000 * comm.rank
    everybody = cupy.empty(5 * comm.size, mine.dtype)
    method = comm.Alltoall if collective == "alltoall" else comm.Allgather
    method(mine, everybody, algorithm=algorithm)
    first = 5 * comm.rank if collective == "alltoall" else 0
    wanted = [np.arange(first, first + 5) + 1000 * rank for rank in range(comm.size)]
    assert np.array_equal(cupy.asnumpy(everybody), np.concatenate(wanted))
