"""Tensors of PyTorch in shared memory where they lie."""

import gc
import os

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator, InvalidBuffer
from collectives.calls import fast_path
from collectives.execution.transport import remapped
from collectives.execution.transport.pages import regions
from tests.mpi.collectives.forms import fresh
from tests.mpi.collectives.test_share import is_adopted, pages_at_the_end, reclaimed  # noqa: F401

torch = pytest.importorskip("torch", reason="needs PyTorch: make install TORCH=1")
pytestmark = [pytest.mark.mpi, pytest.mark.quick_on(2)]

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
ALONE = SIZE * (SIZE + 1) / 2


comm = pytest.fixture(fresh)


def test_gradients_are_summed_where_they_are(comm):
    module = torch.nn.Linear(300, 300)
    parameter = module.weight
    parameter.grad = torch.full_like(parameter, RANK + 1.0)
    gradient = comm.share(parameter.grad)
    assert gradient is parameter.grad
    assert is_adopted(gradient.numpy()) == (comm.ranks_per_node == SIZE)
    for turn in range(3):
        parameter.grad.fill_(RANK + 1.0 + turn)
        comm.Allreduce(MPI.IN_PLACE, gradient, algorithm="direct")
        assert (parameter.grad == ALONE + turn * SIZE).all()
    comm.share(parameter)  # which requires gradients
    before = parameter.detach().clone()
    module(torch.ones(2, 300)).sum().backward()
    torch.optim.SGD(module.parameters(), 0.1).step()
    assert not torch.equal(parameter, before)


def test_the_pages_come_back_before_the_storage_is_freed(comm, monkeypatch):
    found = pages_at_the_end(monkeypatch)
    tensor = comm.share(torch.zeros(10 << 20))
    view = tensor[1:].numpy()
    del tensor
    gc.collect()
    assert found == []
    del view
    gc.collect()
    assert found == [True] * (comm.ranks_per_node == SIZE)


def test_views_of_a_storage_follow_and_outlive_the_tensor(comm):
    tensor = torch.arange(100_000.0)
    view, items = tensor[10:], tensor[20:].numpy()
    comm.share(tensor)
    tensor[30] = -5
    assert view[20] == items[10] == -5
    del tensor, view
    gc.collect()
    comm.Allreduce(MPI.IN_PLACE, items, algorithm="direct")
    wanted = SIZE * np.arange(20.0, 100_000)
    wanted[10] = -5 * SIZE
    np.testing.assert_array_equal(items, wanted)
    kept = items[5:]
    del items
    gc.collect()
    np.testing.assert_array_equal(kept, wanted[5:])


def test_a_storage_cannot_be_resized_and_may_be_replaced(comm):
    tensor = comm.share(torch.full((50_000,), RANK + 1.0))
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.resize_(200_000)
    total = torch.empty(50_000)
    tensor.data = torch.full((50_000,), RANK + 2.0)  # other memory; the old is freed
    others = [torch.full((50_000,), RANK + 3.0) for _ in range(8)]
    for one, more in ((tensor, 1), *((other, 2) for other in others)):
        comm.Allreduce(one, total, algorithm="direct")
        assert (total == ALONE + more * SIZE).all()


def test_a_storage_that_pytorch_moves_is_no_window(comm):
    tensor = comm.share(torch.full((50_000,), RANK + 1.0))
    tensor.share_memory_()  # into memory of PyTorch's own; the old is freed, without a word
    others = [torch.full((50_000,), RANK + 3.0) for _ in range(8)]
    total = torch.empty(50_000)
    for one, more in ((tensor, 0), *((other, 2) for other in others)):
        comm.Allreduce(one, total, algorithm="direct")
        assert (total == ALONE + more * SIZE).all()
    with pytest.raises(InvalidBuffer, match="shared memory of its own already"):
        comm.share(tensor)
    del tensor, one
    gc.collect()
    assert all((other == RANK + 3).all() for other in others)


def test_a_plan_whose_tensor_pytorch_has_moved_says_so(comm):
    """On all ranks here; its memory may be another's by now."""
    if comm.ranks_per_node < SIZE or SIZE == 1:
        pytest.skip("several ranks on one node")
    tensor = comm.share(torch.ones(50_000))
    plan = comm.Allreduce_init(MPI.IN_PLACE, tensor, algorithm="direct")
    plan()
    assert (tensor == SIZE).all()
    tensor.share_memory_()
    others = [torch.full((50_000,), 3.0) for _ in range(8)]
    for use in (plan, plan.Start):
        with pytest.raises((InvalidBuffer, RuntimeError), match=r"make the plan anew|was freed"):
            use()
    assert (tensor == SIZE).all() and all((other == 3).all() for other in others)
    comm.Allreduce(MPI.IN_PLACE, tensor)
    assert (tensor == SIZE**2).all()


def test_memory_that_pytorch_gives_up_keeps_its_pages(comm, monkeypatch):
    """Another thread may be writing there, and would lose that.  A forked child gets its own, and
    so does an array that is shared there later."""
    np.empty(4 << 20)  # so that malloc keeps what is smaller
    tensor = comm.share(torch.zeros(50_000))
    bounds = tensor.data_ptr(), tensor.data_ptr() + 4 * 50_000
    files = {region.file for region in regions(*bounds)} - {0}
    tensor.share_memory_()
    monkeypatch.setattr(remapped, "make_private", None)
    comm.empty(1)
    comm.empty(1)  # now all ranks have let go of it
    monkeypatch.undo()
    if (child := os.fork()) == 0:
        os._exit(bool(files & {region.file for region in regions(*bounds)}))
    assert os.waitpid(child, 0)[1] == 0
    others = [torch.full((50_000,), RANK + 1.0) for _ in range(8)]
    for other in others:
        comm.share(other)
        comm.Allreduce(MPI.IN_PLACE, other, algorithm="direct")
    assert all((other == ALONE).all() for other in others)
    assert (tensor == 0).all()


@pytest.mark.parametrize("kind", ["strided", "sparse", "meta"])
def test_tensors_that_cannot_be_shared(comm, kind):
    tensor = {
        "strided": lambda: torch.zeros(300, 300).t(),
        "sparse": lambda: torch.zeros(300, 300).to_sparse(),
        "meta": lambda: torch.zeros(300, device="meta"),
    }[kind]()
    with pytest.raises(InvalidBuffer, match=r"not contiguous|cannot be shared"):
        comm.share(tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.complex64])
def test_types_that_numpy_lacks_are_moved(comm, dtype):
    tensor = comm.share(torch.full((30_000,), RANK + 1, dtype=dtype))
    comm.Bcast(tensor, root=SIZE - 1)
    assert (tensor == SIZE).all()


def test_a_tensor_on_numpys_memory(comm):
    array = np.full(50_000, RANK + 1.0)
    comm.share(torch.from_numpy(array))
    comm.Allreduce(MPI.IN_PLACE, array, algorithm="direct")
    assert (array == ALONE).all()


@pytest.mark.parametrize("name", ["float32", "int64", "bool", "complex128"])
def test_ordinary_tensors_are_reduced(name):
    """Unread, as no memory is shared yet."""
    with Communicator(MPI.COMM_WORLD) as comm:
        tensor = torch.ones(3, dtype=getattr(torch, name))
        total = torch.empty_like(tensor)
        comm.Allreduce(tensor, total, MPI.LOR if name == "bool" else MPI.SUM)
        assert (total == (1 if name == "bool" else SIZE)).all()
        assert comm.last_plan is fast_path.LEFT_TO_NATIVE


def test_plans_are_found_again_by_a_tensors_memory(comm, monkeypatch):
    tensor = torch.full((5, 100), RANK + 1.0)
    comm.Allreduce(MPI.IN_PLACE, tensor, algorithm="ring")
    assert (tensor == ALONE).all()
    monkeypatch.setattr(comm._engine, "_run_parsed", None)
    for one in (tensor, tensor.view(500), torch.from_numpy(tensor.numpy())):
        one.fill_(RANK + 1.0)
        comm.Allreduce(MPI.IN_PLACE, one, algorithm="ring")
        assert (tensor == ALONE).all()
    for other in (tensor[0], tensor.view(torch.int32), tensor.t()):
        with pytest.raises(TypeError):  # it is read
            comm.Allreduce(MPI.IN_PLACE, other, algorithm="ring")
