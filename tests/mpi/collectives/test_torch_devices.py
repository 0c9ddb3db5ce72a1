"""Tensors that the backend may not read where they lie, as those of a GPU, by a stand-in."""

import pytest
from mpi4py import MPI

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from tests.gpu import backend  # noqa: E402
from tests.gpu.elsewhere import Elsewhere  # noqa: E402

pytestmark = [pytest.mark.mpi, pytest.mark.quick_on(2, 3), pytest.mark.usefixtures("world")]
CALLS = [backend.reduced, backend.moved, backend.between_two, backend.in_background]


@pytest.mark.parametrize("count", [0, 7, backend.LARGE])
@pytest.mark.parametrize("dtype", backend.TYPES, ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_each_call_gives_what_it_gives_on_the_host(comm, call, dtype, count):
    if call is backend.between_two and comm.size == 1:
        pytest.skip("a message needs two")
    wanted = call(count, dtype, "cpu")
    with pytest.MonkeyPatch.context() as patch:
        Elsewhere(patch)
        found = call(count, dtype, "cpu")
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("is_async", [False, True])
def test_a_call_comes_behind_what_is_queued(comm, is_async):
    tensor, got = torch.zeros(5), torch.zeros(3)
    with pytest.MonkeyPatch.context() as patch:
        device = Elsewhere(patch)
        device.stream.queued.append(lambda: tensor.fill_(comm.rank))
        work = dist.all_reduce(tensor, async_op=is_async)
        if is_async:
            work.wait()
        assert tensor.tolist() == [sum(range(comm.size))] * 5
        if comm.size > 1:  # the caller's kernels may still read what a message will overwrite
            seen = []
            device.stream.queued.append(lambda: seen.append(got.tolist()))
            work = dist.irecv(got, (comm.rank - 1) % comm.size)
            dist.send(torch.full((3,), 7.0), (comm.rank + 1) % comm.size)
            work.wait()
            assert seen == [[0.0] * 3]
            assert got.tolist() == [7.0] * 3


def test_sparse_tensors_and_a_module(comm):
    with pytest.MonkeyPatch.context() as patch:
        Elsewhere(patch)
        tensor = torch.eye(4)[comm.rank % 4].to_sparse()
        dist.all_reduce(tensor)
        module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
        module(torch.full((1, 3), float(comm.rank))).sum().backward()
    assert tensor.to_dense().sum().item() == comm.size
    mean = sum(range(comm.size)) / comm.size
    assert module.module.weight.grad.tolist() == [[mean] * 3] * 2
    assert comm.allreduce(1, MPI.SUM) == comm.size
