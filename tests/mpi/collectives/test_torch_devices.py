"""Tensors that the backend may not read where they lie, as those of a GPU, by a stand-in."""

from functools import partial
from itertools import product
from weakref import ref

import pytest
import torch
import torch.distributed as dist

from tests.cases import mostly_slow
from tests.gpu import backend
from tests.gpu.elsewhere import Elsewhere, Stream
from tests.mpi.collectives.forms import LEFT, RANK, RIGHT, P

pytestmark = [pytest.mark.quick_on(3), pytest.mark.usefixtures("world")]
CALLS = [backend.reduced, backend.moved, backend.between_two, backend.in_background]


@pytest.mark.parametrize(
    ("dtype", "count"),
    mostly_slow(
        product(backend.TYPES, (0, 7, backend.LARGE)),
        lambda case: case[0] is backend.TYPES[0] or case[1] == 7,
    ),
    ids=str,
)
@pytest.mark.parametrize("call", CALLS)
def test_each_call_gives_what_it_gives_on_the_host(comm, call, dtype, count):
    if call is backend.between_two and comm.size == 1:
        pytest.skip("a message needs two")
    wanted = call(count, dtype, "cpu")
    with pytest.MonkeyPatch.context() as patch:
        Elsewhere(patch)
        found = call(count, dtype, "cpu")
    assert all(map(torch.equal, found, wanted))


@pytest.fixture
def device():
    with pytest.MonkeyPatch.context() as patch:
        yield Elsewhere(patch)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_call_comes_behind_what_is_queued(device, is_async):
    tensor, got, seen = torch.zeros(5), torch.zeros(3), []
    device.stream.queued.append(lambda: tensor.fill_(RANK))
    work = dist.all_reduce(tensor, async_op=is_async)
    if is_async:
        work.wait()
    assert tensor.tolist() == [sum(range(P))] * 5
    if P > 1:  # the caller's kernels may still read what a message will overwrite
        device.stream.queued.append(lambda: seen.append(got.tolist()))
        work = dist.irecv(got, LEFT)
        dist.send(torch.full((3,), 7.0), RIGHT)
        work.wait()
        assert seen == [[0.0] * 3]
        assert got.tolist() == [7.0] * 3


def test_sparse_tensors_and_a_module(device):
    tensor = torch.eye(4)[RANK % 4].to_sparse()
    dist.all_reduce(tensor)
    assert tensor.to_dense().sum().item() == P
    module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    module(torch.full((1, 3), float(RANK))).sum().backward()
    assert module.module.weight.grad.tolist() == [[sum(range(P)) / P] * 3] * 2


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("later", [False, True])
def test_lists_may_have_tensors_of_both_kinds(device, first, later):
    """Every second tensor is the host's; some have gaps, some have no items."""
    rank, size, works, how = RANK, P, [], {"async_op": later}

    def row(values):
        made = [torch.zeros(n, 2)[:, n % 2] if n % 2 else torch.zeros(n) for n in range(size + 1)]
        for n, tensor in enumerate(made):
            tensor += values(n)
            if n % 2 == first:
                device.here(tensor)
        return made

    got, sums, mine = row(lambda n: 0), row(lambda n: n + rank), row(lambda n: 10 * rank + n)
    works.append(dist.all_gather(got[:size], mine[rank], **how))
    for part in mine:
        works.append(dist.all_reduce(part, dist.ReduceOp.MAX, **how))
    block = row(lambda n: 0)[rank + 1]
    works.append(dist.reduce_scatter(block, row(lambda n: n + rank)[1:], **how))
    exchanged = [device.here(torch.zeros(rank + 1)) for _ in range(size)]
    works.append(dist.all_to_all(exchanged, row(lambda n: rank)[1:], **how))
    dist.group.WORLD.allreduce_coalesced(sums).wait()  # whether the others were waited for or not
    for work in works:
        assert work is None or work.wait()
    for r in range(size):
        assert got[r].tolist() == [11.0 * r] * r
        assert exchanged[r].tolist() == [float(r)] * (rank + 1)
    for n in range(size + 1):
        assert sums[n].tolist() == [float(n * size + sum(range(size)))] * n
        assert mine[n].tolist() == [10.0 * (size - 1) + n] * n
    total = size * (rank + 1) + sum(range(size))
    assert block.tolist() == [float(total)] * (rank + 1)


def test_an_error_of_a_copy_is_told_to_who_waits_and_no_other(comm, device):
    """A tensor that cannot be written to is found when its call ends, after the ranks have met."""
    for is_async in (False, True):
        with pytest.raises(RuntimeError, match="single memory location"):
            work = dist.all_reduce(torch.ones(1).expand(4), async_op=is_async)
            assert work.wait()
    if comm.size > 1:
        lost = dist.irecv(torch.zeros(1).expand(4), LEFT)
        dist.send(torch.ones(4), RIGHT)
        comm.Barrier()
        while not lost.is_completed():
            pass
        got, sent = torch.zeros(2), torch.ones(2)
        both = dist.P2POp(dist.irecv, got, LEFT), dist.P2POp(dist.isend, sent, RIGHT)
        dist.batch_isend_irecv([*both])[0].wait()
        assert got.tolist() == [1.0, 1.0] and not lost.is_success()
        with pytest.raises(RuntimeError, match="single memory location"):
            lost.wait()
    dist.all_reduce(tensor := torch.ones(3))
    assert tensor.tolist() == [comm.size] * 3


def fill(tensor, value):
    tensor().fill_(value)


def test_works_and_tensors_may_be_dropped(comm, device):
    """Calls of two groups on two streams, in another order on each rank; nobody keeps anything."""
    groups, results = [dist.new_group() for _ in range(2)], [[], []]
    for turn in range(10):
        order = (0, 1) if (comm.rank + turn) % 2 else (1, 0)
        for i in order:
            device.stream = Stream(torch.device("cpu"))
            source, out = torch.zeros(4 * comm.size), torch.empty(4)
            device.stream.queued.append(partial(fill, ref(source), turn + i))
            dist.reduce_scatter_tensor(out, source, group=groups[i], async_op=True)
            results[i].append(out)
            if comm.size > 1:
                got = torch.zeros(300)
                dist.irecv(got, LEFT, groups[i])
                dist.isend(torch.full((300,), float(turn)), RIGHT, groups[i])
                results[i].append(got)
            del source, out
            torch.full((4 * comm.size,), -1.0)
    for i, group in enumerate(groups):
        dist.destroy_process_group(group)
        found = [tensor.unique().tolist() for tensor in results[i]]
        wanted = [[[comm.size * (turn + i)], [turn]][: len(found) // 10] for turn in range(10)]
        assert found == [one for each in wanted for one in each]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("is_here", [False, True])
def test_a_message_that_nobody_waits_for_does_not_keep_a_group_from_its_end(comm, device, is_here):
    """Its error is told at the end, and the other ranks' end comes."""
    group, got = dist.new_group(), [torch.zeros(3) for _ in range(2)]
    if comm.rank == 0:
        for tensor in got:
            dist.irecv(device.here(tensor) if is_here else tensor, 1, group)
    elif comm.rank == 1:
        for items in (2, 3):
            dist.isend(torch.ones(items), 0, group)
    if comm.rank:
        dist.destroy_process_group(group)
    else:
        with pytest.raises(ValueError, match="same shape"):
            dist.destroy_process_group(group)
        assert got[1].tolist() == [1.0] * 3
