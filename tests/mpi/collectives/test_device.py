"""CuPy arrays over real ranks: on a GPU, which they may share, or on ``tests/queued_cupy``, where
work is queued and done as late as is allowed, on the second of two GPUs of each rank."""

import hashlib

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.__main__ import main
from collectives.algorithms import names
from tests import queued_cupy
from tests.mpi.collectives.test_bench import QUICK, bench
from tests.queued_cupy import Machine, RecordedTransport

pytestmark = pytest.mark.mpi


def cupy_with_a_gpu():
    """CuPy, or ``None``."""
    try:
        import cupy
    except ImportError:
        return None
    try:
        return cupy if cupy.cuda.runtime.getDeviceCount() else None
    except cupy.cuda.runtime.CUDARuntimeError:
        return None


@pytest.fixture(scope="module")
def cupy():
    real = cupy_with_a_gpu()
    if real is not None:
        real.cuda.Device(MPI.COMM_WORLD.rank % real.cuda.runtime.getDeviceCount()).use()
        yield real
        return
    with pytest.MonkeyPatch.context() as patch:
        yield queued_cupy.install(patch, Machine(devices=2))


def stands_in(cupy):
    """Whether there is no GPU."""
    return hasattr(cupy, "machine")


@pytest.fixture(autouse=True)
def ordered(cupy):
    """Nothing may have happened that nobody ordered."""
    if stands_in(cupy):
        cupy.cuda.Device(1).use()
    yield
    if stands_in(cupy):
        cupy.machine.expect_no_races()


@pytest.fixture(scope="module", params=["staged", "direct", "ipc"])
def road(request):
    """How the bytes go; by CUDA IPC from arrays that all ranks can address."""
    return request.param


@pytest.fixture
def once(road):
    """The benchmark has communicators of its own, so one road is enough."""
    if road != "staged":
        pytest.skip("as on the first road")


@pytest.fixture(scope="module")
def comm(road, cupy):
    if not stands_in(cupy):  # with CuPy, MPI may crash
        device, transport = "staged" if road == "staged" else "auto", None
    else:
        cupy.cuda.Device(1).use()
        device, transport = "direct" if road == "direct" else "staged", RecordedTransport
    with Communicator(MPI.COMM_WORLD, device=device, transport=transport) as communicator:
        yield communicator


@pytest.fixture(scope="module")
def put(road, comm):
    return Placed(comm.empty(1 << 22, np.uint8, "cupy") if road == "ipc" else None)


class Placed:
    """Puts arrays where all ranks can address them, or leaves them where they are."""

    def __init__(self, memory):
        self.memory = memory
        self.used = 0

    def __call__(self, items):
        if self.memory is None:
            return items
        placed = self.memory[self.used : self.used + items.nbytes].view(items.dtype)
        self.used += -(-items.nbytes // 256) * 256
        placed[...] = items.reshape(-1)
        return placed.reshape(items.shape)

    def afresh(self):
        """Forgets the arrays."""
        self.used = 0


@pytest.mark.quick_on(3)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("algorithm", [*names("allreduce"), "auto"])
def test_every_all_reduce(comm, cupy, put, algorithm, in_place):
    cases = [(count, np.float32) for count in (0, 1, 100_000)]
    types = (np.int32, np.float16, np.float32, np.float64, np.complex64)
    for count, dtype in (*cases, *((comm.size + 1, dtype) for dtype in types)):
        put.afresh()
        mine = put((cupy.arange(count) % 7 + comm.rank).astype(dtype))
        result = put(mine.copy() if in_place else cupy.full_like(mine, 99))
        comm.Allreduce(MPI.IN_PLACE if in_place else mine, result, algorithm=algorithm)
        total = comm.size * (np.arange(count) % 7) + comm.size * (comm.size - 1) // 2
        assert np.array_equal(cupy.asnumpy(result), total.astype(dtype))


@pytest.mark.parametrize("algorithm", ["ring", "butterfly", "direct", "circulant"])
def test_replicas_are_bitwise_equal(comm, cupy, put, algorithm):
    put.afresh()
    items = put(cupy.asarray(np.random.default_rng(comm.rank).random(10_001, np.float32)))
    comm.Allreduce(MPI.IN_PLACE, items, algorithm=algorithm)
    digests = comm.allgather(hashlib.blake2b(cupy.asnumpy(items).tobytes()).digest())
    assert len(set(digests)) == 1


def test_offsets_and_views(comm, cupy, put):
    put.afresh()
    pool = put(cupy.zeros(10_000, np.float32))
    view = pool[123:5123]
    view[...] = comm.rank
    comm.Allreduce(MPI.IN_PLACE, view, algorithm="ring")
    assert bool((view == comm.size * (comm.size - 1) // 2).all())
    assert not bool(pool[:123].any()) and not bool(pool[5123:].any())


def test_the_stream_is_waited_for(comm, cupy, put):
    """A kernel that takes long writes the input right before."""
    side = 100 if stands_in(cupy) else 4000
    slow = cupy.ones((side, side), np.float32)
    for turn in range(5):
        for _ in range(10):
            slow = slow @ slow
            slow /= slow.max()
        put.afresh()
        items = put(slow[0] * (comm.rank + turn + 1))
        comm.Allreduce(MPI.IN_PLACE, items, algorithm="ring")
        total = comm.size * (turn + 1) + comm.size * (comm.size - 1) // 2
        assert cupy.allclose(items, slow[0] * total)


@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [(c, a) for c in ("allgather", "alltoall") for a in (*names(c), "auto")],
)
def test_gathering_and_exchanging(comm, cupy, put, collective, algorithm):
    put.afresh()
    blocks = comm.size if collective == "alltoall" else 1
    mine = put(cupy.arange(5 * blocks) + 1000 * comm.rank)
    everybody = put(cupy.empty(5 * comm.size, mine.dtype))
    method = comm.Alltoall if collective == "alltoall" else comm.Allgather
    method(mine, everybody, algorithm=algorithm)
    first = 5 * comm.rank if collective == "alltoall" else 0
    wanted = [np.arange(first, first + 5) + 1000 * rank for rank in range(comm.size)]
    assert np.array_equal(cupy.asnumpy(everybody), np.concatenate(wanted))


def test_auto_says_what_it_runs(road, comm, cupy, put):
    put.afresh()
    items = put(cupy.ones(1000, np.float32))
    comm.Allreduce(MPI.IN_PLACE, items)
    plan = comm.last_plan
    shares = "in device memory that the ranks share" in plan.reason
    assert shares == (road == "ipc")
    assert plan.algorithm == ("direct" if shares and comm.size != 2 else "butterfly")


@pytest.mark.quick_on(2)
@pytest.mark.parametrize(
    "collective",
    [
        "allreduce",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("reduce_scatter", "allgather", "broadcast")
        ),
    ],
)
def test_the_benchmark(road, comm, cupy, tmp_path, collective):
    """Beside the library's by way of the host and, where each rank has a GPU, NCCL's."""
    if road == "direct":
        pytest.skip("as staged, on the same memory")
    has_own_gpu = comm.size == 1 or stands_in(cupy)
    wanted = f"{names(collective)[0]},auto" + (",nccl" if has_own_gpu else "")
    memory = "ipc" if road == "ipc" else "cupy"
    arguments = [*QUICK, "--memory", memory, "--algorithm", wanted]
    status, told, _ = bench(comm, tmp_path, collective, *arguments)
    assert status == 0
    assert {r["algorithm"] for r in told["results"]} == {*wanted.split(","), "native"}
    assert all(r["wrong"] == 0 and r["memory"] == memory for r in told["results"])
    assert {r["reason"] for r in told["results"] if r["ran"] == "native"} == {"by way of the host"}
    assert told["environment"]["gpu"]


@pytest.mark.quick_on(2)
def test_the_benchmark_in_place_and_overlapping(comm, cupy, once, tmp_path):
    arguments = [*QUICK, "--memory", "cupy", "--algorithm", "ring", "--place", "both"]
    status, told, _ = bench(comm, tmp_path, "allreduce", *arguments, "-o", "max", "--overlap", "4")
    assert status == 0
    assert all(r["wrong"] == 0 and r["overlap"] is not None for r in told["results"])
    assert {r["in_place"] for r in told["results"]} == {False, True}


@pytest.mark.quick_on(2)
def test_nccl_is_told_apart_from_nothing(comm, cupy, once, tmp_path, monkeypatch):
    """A row that does nothing is counted as wrong."""
    if not stands_in(cupy):
        pytest.skip("NCCL itself is not broken")
    monkeypatch.setattr(queued_cupy.nccl.Communicator, "allReduce", lambda *given: None)
    arguments = [*QUICK, "--memory", "cupy", "--algorithm", "ring,nccl"]
    status, told, _ = bench(comm, tmp_path, "allreduce", *arguments)
    assert status == 1
    assert {r["algorithm"] for r in told["results"] if r["wrong"]} == {"nccl"}


@pytest.mark.quick_on(2)
def test_what_the_benchmark_refuses(comm, cupy, once, capsys, monkeypatch):
    assert main(["bench", "allreduce", "--algorithm", "nccl"]) == 2
    if stands_in(cupy):
        with monkeypatch.context() as patch:
            patch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 0)
            assert main(["bench", "allreduce", "--memory", "cupy"]) == 2
        # The child that tries it has no CuPy.
        assert main(["bench", "latency", "--memory", "cupy"]) == 2
    told = capsys.readouterr().err
    if comm.rank == 0:
        assert "nccl needs --memory cupy or ipc" in told
        if stands_in(cupy):
            assert "rank 0: no GPU" in told
            assert "this MPI cannot send device memory" in told
