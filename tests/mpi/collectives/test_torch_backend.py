"""Groups of ``torch.distributed`` over MPI, on the ranks of this job."""

import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

from collectives.errors import MismatchError
from collectives.torch.backend import backend_of
from collectives.torch.devices import device_types
from collectives.torch.register import version
from tests.cases import slow_case
from tests.mpi.collectives.forms import LAST, LEFT, RANK, RIGHT, P

pytestmark = [pytest.mark.quick_on(3), pytest.mark.usefixtures("world")]
RANKS = range(P)
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
WHOLE = [*INTEGERS, torch.uint16, torch.uint32, torch.uint64]


def sharded(tensor):
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    return distribute_tensor(tensor, init_device_mesh("cpu", (P,)))


MAX, WAIT = dist.ReduceOp.MAX, timedelta(seconds=60)
FIELDS = {"op": "reduceOp", "root": "rootRank"}


@pytest.mark.parametrize(
    ("name", "kind", "values"),
    [
        ("allreduce", dist.AllreduceOptions, {"op": MAX}),
        ("reduce_scatter", dist.ReduceScatterOptions, {"op": MAX}),
        ("reduce", dist.ReduceOptions, {"root": LAST, "op": MAX}),
        ("broadcast", dist.BroadcastOptions, {"root": LAST}),
        ("gather", dist.GatherOptions, {"root": LAST}),
        ("scatter", dist.ScatterOptions, {"root": LAST}),
        ("allreduce_coalesced", dist.AllreduceCoalescedOptions, {"op": MAX}),
        ("_reduce_scatter_base", dist.ReduceScatterOptions, {"op": MAX}),
        ("reduce_scatter_tensor_coalesced", dist.ReduceScatterOptions, {"op": MAX}),
    ],
)
def test_the_methods_of_a_group_take_options_as_those_of_torch_do(name, kind, values):
    options, first = kind(), (*values.values(),)[:1]
    for one, value in values.items():
        setattr(options, FIELDS[one], value)
    ways = [((options,), {}), ((), {"opts": options})]
    wrong = [(one, {}) for one in ((WAIT,), ("SUM",), (dist.BarrierOptions(),))]
    wrong += [((options,), values), (first, values), (first, {"opts": options}), ((), {"opp": MAX})]
    if "coalesced" not in name and "base" not in name:  # which take no others
        ways += [(way, {}) for way in ((*values.values(),), (*values.values(), WAIT))]
        ways += [((), values), ((), values | {"timeout": WAIT})]
    if "root" in values:
        wrong.append(((MAX,), {}))  # torch's is an integer, too

    def arguments():
        own, got, least = torch.full((2,), 1.0 * P - RANK), torch.zeros(2), [1.0] * 2
        blocks = [torch.full((2,), 10.0 * RANK + r) for r in RANKS]
        most, block = [1.0 * P] * 2, [10.0 * LAST + RANK] * 2
        at_root, gathered = RANK == LAST, [torch.zeros(2) for _ in RANKS]
        return {
            "allreduce": ((own,), own, most),
            "reduce_scatter": ((got, blocks), got, block),
            "reduce": ((own,), own, most if at_root else own.tolist()),
            "broadcast": ((own,), own, least),
            "gather": ((gathered, own), gathered[0], most if at_root else [0.0] * 2),
            "scatter": ((got, blocks if at_root else []), got, block),
            "allreduce_coalesced": (([own],), own, most),
            "_reduce_scatter_base": ((got, torch.cat(blocks)), got, block),
            "reduce_scatter_tensor_coalesced": (([got], [torch.cat(blocks)]), got, block),
        }[name]

    call = getattr(dist.group.WORLD, name)
    for given, named in ways:
        tensors, found, expected = arguments()
        with backend_of(dist.group.WORLD).order.runs:  # so that the call runs later
            work = call(*tensors, *given, **named)
            for one in tensors:
                if isinstance(one, list):
                    one.clear()
        work.wait()
        assert found.tolist() == expected, (given, named)
    for given, named in wrong:
        with pytest.raises(TypeError):
            call(*arguments()[0], *given, **named)


def test_the_methods_of_a_group_have_torch_s_names_of_options():
    group, own, got = dist.group.WORLD, torch.ones(P), torch.zeros(4, P)
    sizes = {"output_split_sizes": [], "input_split_sizes": []}
    lists = [*got[0].split(1)], [*got[3].split(1)], [*own.split(1)]
    with backend_of(group).order.runs:
        works = group.allgather(lists[0], own[:1], timeout=WAIT), group.alltoall(*lists[1:])
        for one in lists:
            one.clear()
    for work in (
        *works,
        group.barrier(timeout=WAIT),
        group.barrier(opts=dist.BarrierOptions()),
        group.all_to_all_single(got[1], own, **sizes, timeout=WAIT),
        group.all_gather_single(got[2], own[:1], opts=dist.distributed_c10d.AllgatherOptions()),
        group.recv([received := torch.zeros(1)], srcRank=LEFT, tag=3),
        group.send([own[:1]], dstRank=RIGHT, tag=3),
    ):
        work.wait()
    assert got.tolist() == [own.tolist()] * 4 and received.item() == 1


@pytest.mark.parametrize("count", [47, 2003])
@pytest.mark.parametrize("op", ["SUM", "AVG"])
@pytest.mark.parametrize("dtype", WHOLE, ids=str)
def test_integers_wrap_in_sums_and_never_in_means(dtype, op, count):
    """Whatever the call, and whatever items of a vector the MPI library's loops would take."""
    info, how = torch.iinfo(dtype), getattr(dist.ReduceOp, op)
    ends = [info.max - 1, info.max // 2 + 5, info.min + 3, 7, info.min]
    mine = [ends[(i * (RANK + 1)) % 5] for i in range(5)]
    sums = [sum(ends[(i * (r + 1)) % 5] for r in RANKS) for i in range(5)]
    if op == "SUM":
        wrapped = [(one - info.min) % (1 << info.bits) + info.min for one in sums]
    else:
        wrapped = [abs(one) // P * (1 if one >= 0 else -1) for one in sums]
    given, expected = (
        torch.tensor(five, dtype=dtype).repeat(count // 5 + 1)[:count] for five in (mine, wrapped)
    )
    dist.all_reduce(both := given.clone(), how)
    dist.reduce(rooted := given.clone(), 0, how)
    dist.reduce_scatter_tensor(block := torch.zeros_like(given), given.repeat(P), how)
    parts = [given[: count // (r + 1)] for r in RANKS]
    dist.reduce_scatter(unequal := torch.zeros_like(parts[RANK]), parts, how)
    for found in (both, block, *([] if RANK else [rooted])):
        assert torch.equal(found, expected)
    assert torch.equal(unequal, expected[: len(unequal)])
    if dtype in INTEGERS:  # torch adds no others where indices are equal
        every = [*range(count)]
        dist.all_reduce(sparse := torch.sparse_coo_tensor([every], given), how)
        assert torch.equal(sparse.to_dense(), expected) and sparse.is_coalesced()


def test_sixteen_bits_are_rounded_once():
    values = [1.0] + [2.0**-9] * (P - 1)
    tensor = torch.tensor([values[RANK]] * 5, dtype=torch.bfloat16)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [torch.tensor(sum(values)).bfloat16().item()] * 5


def test_blocks_that_mpi_cannot_count_go_in_rows(monkeypatch):
    monkeypatch.setattr("collectives.torch.copies.COUNTABLE", 5)
    sent = torch.tensor([[10 * RANK + r] * 3 for r in RANKS for _ in range(r + RANK)])
    got = torch.empty_like(sent)
    sizes = [r + RANK for r in RANKS]
    dist.all_to_all_single(got, sent, sizes, sizes)
    assert got.tolist() == [[10 * r + RANK] * 3 for r in RANKS for _ in range(r + RANK)]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("shape", "dtype"), [((9,), torch.float), ((3, 1), torch.float), ((3,), torch.double)]
)
def test_sparse_tensors_that_are_not_alike_are_refused_on_all_ranks(shape, dtype):
    made = (shape, dtype) if RANK == 1 else ((3,), torch.float)
    tensor = torch.ones(made[0], dtype=made[1]).to_sparse(1)
    with pytest.raises(MismatchError, match=r"rank 0 sums \(3,\) of torch.float32, 1 .* rank 1 "):
        dist.all_reduce(tensor)
    assert MPI.COMM_WORLD.allreduce(1) == P


def test_a_callback_communicates():
    tensor, second = torch.ones(4), torch.ones(4)

    def again(future):
        dist.all_reduce(second.copy_(future.value()[0]), async_op=True).wait()
        return second

    future = dist.all_reduce(tensor, async_op=True).get_future().then(again)
    assert future.wait().tolist() == [float(P**2)] * 4


@pytest.mark.parametrize("earlier", [0, 1])
def test_first_calls_of_groups_come_in_another_order_on_each_rank(earlier):
    """MPI makes communicators one after the other, so a group makes all that it needs at once."""
    groups, parts = [dist.new_group() for _ in range(2)], [torch.empty(50_000) for _ in range(2)]
    for group, part in zip(groups, parts, strict=True):
        dist.all_reduce(part, group=group)

    def begun(i):
        whole = torch.ones(50_000 * P)
        return dist.reduce_scatter_tensor(parts[i], whole, group=groups[i], async_op=True)

    work = begun(earlier) if RANK else None
    if RANK:
        time.sleep(0.1)  # the group's thread has begun
    begun(1 - earlier).wait()
    (work or begun(earlier)).wait()
    assert all(part[-1] == P for part in parts)
    for group in groups:
        dist.destroy_process_group(group)


def test_another_backend_stands_beside_it():
    group, cuda = dist.new_group(backend="cpu:collectives,cuda:gloo"), torch.device("cuda")
    if version() >= (2, 14):
        assert group._get_backend(cuda).name() == "gloo"
    elif "cuda" in device_types():  # of a torch that is made for GPUs, ours takes all tensors
        assert group._get_backend(cuda) is group
    else:
        with pytest.raises(RuntimeError, match=r"2\.14"):
            group._get_backend(cuda)
    dist.all_reduce(tensor := torch.ones(1), group=group)
    assert tensor.item() == P
    dist.destroy_process_group(group)


def test_a_message_that_a_future_waits_for_holds_up_no_other():
    future = dist.irecv(torch.empty(1), LEFT).get_future()
    dist.barrier()
    dist.isend(torch.tensor([1.0 * RANK]), RIGHT).wait()
    assert future.wait()[0].item() == LEFT


@pytest.mark.parametrize("items", [1, 3])
def test_a_message_of_another_size_is_an_error(items):
    dist.isend(torch.ones(items), RIGHT)
    work = dist.irecv(torch.empty(2), LEFT)
    with pytest.raises((ValueError, RuntimeError), match=r"same shape|[Tt]runcate"):
        work.wait()
    dist.isend(torch.ones(items), RIGHT)
    work = dist.irecv(torch.empty(2), LEFT)
    for reads in (work.get_future().wait, work.wait):  # who only reads the future may drop it
        with pytest.raises((ValueError, RuntimeError), match=r"same shape|[Tt]runcate"):
            reads()


def test_the_root_refuses_blocks_of_another_size():
    if RANK == 0:  # before it communicates
        blocks = [torch.empty(1), *[torch.empty(2)] * (P - 2), torch.empty(3)]
        for call in (dist.gather, dist.scatter):
            with pytest.raises(ValueError, match="does not fit"):
                call(torch.ones(2), blocks[-P:])


def test_an_input_in_its_output_is_sent_as_it_was():
    both = torch.arange(2.0 * P) + 100 * RANK
    expected = torch.cat([torch.arange(2.0) + 2 * RANK + 100 * r for r in RANKS])
    dist.all_to_all(list(both.split(2)), list(both.split(2)))
    assert torch.equal(both, expected)
    dist.all_to_all_single(both, both)  # the blocks return
    assert torch.equal(both, torch.arange(2.0 * P) + 100 * RANK)
    dist.gather(both[2 * RANK :][:2], list(both.split(2)) if RANK == 0 else None)
    if RANK == 0:
        assert torch.equal(both, torch.cat([torch.arange(2.0) + 102 * r for r in RANKS]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("op", ["SUM", "AVG"])
def test_tensors_of_inference_mode_are_reduced_in_the_background(op, dtype):
    group, expected = dist.new_group(), P if op == "SUM" else 1
    with torch.inference_mode():
        tensors = [torch.ones(5, dtype=dtype), torch.ones(1 << 20, dtype=dtype)]
        dist.all_reduce(tensors[1], group=group)
        tensors[1].fill_(1)
        for tensor in tensors:
            work = dist.all_reduce(tensor, getattr(dist.ReduceOp, op), group, async_op=True)
            work.get_future().wait()  # so the group's thread runs it
    assert all((tensor == expected).all() for tensor in tensors)
    dist.all_reduce(outside := torch.ones(1 << 20, dtype=dtype), group=group)
    assert (outside == P).all()
    dist.destroy_process_group(group)


@pytest.mark.parametrize("items", [10, 50_000])
def test_a_storage_can_be_resized_afterwards(items):
    tensor = torch.ones(items)
    for _ in range(5):
        dist.all_reduce(tensor)
    tensor.untyped_storage().resize_(0)


TWO, THREE = torch.ones(2), torch.ones(3)
QUANTIZED = partial(torch.quantize_per_tensor, TWO, 1, 3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: dist.all_reduce(torch.ones(2, 2).to_sparse_csr()), "make it dense"),
        (lambda: dist.all_gather([THREE] * P, TWO), "does not fit"),
        (lambda: dist.all_to_all_single(torch.empty(P), torch.ones(2 * P)), "does not fit"),
        (lambda: dist.all_to_all_single(torch.ones(()), torch.ones(())), "input is one number"),
        (lambda: dist.all_to_all([THREE] * P, [TWO] * P), "does not fit"),
        (lambda: dist.all_reduce(TWO.int(), dist._make_nccl_premul_sum(0.5)), "factor"),
        (lambda: dist.all_reduce(QUANTIZED(torch.qint32)), r"qint32.*tensor\.dequantize"),
        (lambda: dist.broadcast(QUANTIZED(torch.qint8), 0), r"qint8.*tensor\.dequantize"),
        (lambda: torch.func.vmap(dist.all_reduce)(torch.ones(3, 2)), r"leave torch\.func"),
        slow_case(  # imports much
            *(lambda: dist.all_reduce(sharded(torch.ones(2))), "a DTensor .* DTensor.to_local")
        ),
    ],
)
def test_what_cannot_be_done_is_refused_on_each_rank(call, words):
    with pytest.raises((ValueError, RuntimeError), match=words):
        call()
    assert MPI.COMM_WORLD.allreduce(1) == P
