"""CuPy arrays over real ranks: on a GPU, which they may share, or on ``tests/queued_cupy``, where
work is queued and done as late as is allowed, on the second of two GPUs of each rank."""

from contextlib import nullcontext

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.algorithms import names
from tests import queued_cupy
from tests.cases import each_check, slow_case
from tests.gpu import controls, leaving, roads
from tests.gpu.check import stand_in
from tests.mpi.collectives.test_bench import QUICK, bench
from tests.queued_cupy import Machine


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


@pytest.fixture(scope="module")
def comm(cupy):
    with Communicator(MPI.COMM_WORLD, device="staged") as communicator:
        yield communicator


EVERY = (*roads.CHECKS, *controls.CHECKS, *leaving.CHECKS)
LONG = {
    f"leaving.{what}"
    for what in ("memory, staged", "memory, ipc", "pools, staged", "pools, direct")
}
CHECKS = each_check((one for one in EVERY if not one.is_killed), lambda name: name not in LONG)


@pytest.mark.quick_on(3)
@pytest.mark.parametrize("check", CHECKS)
def test_each_check_of_collectives_on_a_gpu(cupy, check):
    if max(check.ranks) > 1 and MPI.COMM_WORLD.size == 1:
        pytest.skip("for several ranks")
    with stand_in(check) if stands_in(cupy) else nullcontext():
        check.run()


@pytest.mark.parametrize("road", ["staged", "ipc"])
def test_auto_says_what_it_runs(comm, road):
    comm.Allreduce(MPI.IN_PLACE, roads.place(comm, road, 1000, np.float32))
    plan = comm.last_plan
    shares = "in device memory that the ranks share" in plan.reason
    assert shares == (road == "ipc")
    assert plan.algorithm == ("direct" if shares and comm.size != 2 else "butterfly")


@pytest.mark.quick_on(2, 3)
@pytest.mark.parametrize("memory", ["cupy", "ipc"])
@pytest.mark.parametrize(
    "collective",
    ["allreduce", *(slow_case(name) for name in ("reduce_scatter", "allgather", "broadcast"))],
)
def test_the_benchmark(comm, cupy, folder, collective, memory):
    """Beside the library's by way of the host and, where each rank has a GPU, NCCL's."""
    has_own_gpu = comm.size == 1 or stands_in(cupy)
    wanted = f"{names(collective)[0]},auto" + (",nccl" if has_own_gpu else "")
    arguments = [*QUICK, "--memory", memory, "--algorithm", wanted]
    status, told = bench(folder, collective, *arguments)
    assert status == 0
    assert {r["algorithm"] for r in told["results"]} == {*wanted.split(","), "native"}
    assert all(r["wrong"] == 0 and r["memory"] == memory for r in told["results"])
    assert {r["reason"] for r in told["results"] if r["ran"] == "native"} == {"by way of the host"}
    assert told["environment"]["gpu"]


@pytest.mark.quick_on(2, 3)
def test_nccl_is_told_apart_from_nothing(cupy, folder, monkeypatch):
    """A row that does nothing is counted as wrong."""
    if not stands_in(cupy):
        pytest.skip("NCCL itself is not broken")
    monkeypatch.setattr(queued_cupy.nccl.Communicator, "allReduce", lambda *given: None)
    arguments = [*QUICK, "--memory", "cupy", "--algorithm", "ring,nccl"]
    status, told = bench(folder, "allreduce", *arguments)
    assert status == 1
    assert {r["algorithm"] for r in told["results"] if r["wrong"]} == {"nccl"}
