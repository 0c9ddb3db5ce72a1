"""Floating-point numbers of 16 and 8 bits, most of which neither NumPy nor MPI has."""

import sys
from importlib.util import find_spec

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator, InvalidBuffer
from tests.mpi.collectives.forms import FORMS, run

pytestmark = pytest.mark.mpi

KINDS = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "float8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
}
all_kinds = pytest.mark.parametrize(
    "kind", [k if k == "bfloat16" else pytest.param(k, marks=pytest.mark.slow) for k in KINDS]
)
all_ways = pytest.mark.parametrize(
    "way", [FORMS[0], *(pytest.param(form, marks=pytest.mark.slow) for form in FORMS[1:])]
)
HAS_TORCH = find_spec("torch") is not None
COUNT = 5
SMALLEST = 2.0**-4


def tensor_of(items):
    torch = pytest.importorskip("torch", reason="torch is not installed: make test TORCH=1")
    integers = items.view(np.int16 if items.itemsize == 2 else np.uint8)
    return torch.from_numpy(integers).view(getattr(torch, items.dtype.name))


#: What has the memory, and whether the ranks share it.
MEMORY = {
    "arrays": lambda comm, items: items,
    "shared arrays": lambda comm, items: filled(comm.empty(items.shape, items.dtype), items),
    "tensors": lambda comm, items: tensor_of(items),
}


def filled(target, items):
    target[...] = items
    return target


def sent(rank, blocks, kind):
    """Numbers that the type has, whose sums of some ranks float32 has."""
    numbers = np.random.default_rng([7, rank]).integers(-16, 17, COUNT * blocks)
    return (numbers * SMALLEST).astype(KINDS[kind])


def total(ranks, blocks, kind):
    """The sum over these ranks, rounded once."""
    numbers = [sent(rank, blocks, kind).astype(np.float64) for rank in ranks]
    return np.sum(numbers, axis=0).astype(np.float32).astype(KINDS[kind])


def calls(comm, kind):
    """For each method: its arguments but the receive buffer, that one's length, and what comes."""
    size, rank, everybody = comm.size, comm.rank, range(comm.size)
    counts = [COUNT] * size
    whole = total(everybody, size, kind).reshape(size, -1)
    gathered = np.concatenate([sent(r, 1, kind) for r in everybody])
    crossed = np.concatenate([sent(r, size, kind).reshape(size, -1)[rank] for r in everybody])
    mine, all_mine = sent(rank, 1, kind), sent(rank, size, kind)
    return {
        "Allreduce": ([mine], 1, total(everybody, 1, kind)),
        "Reduce": ([mine], 1, total(everybody, 1, kind) if rank == 0 else None),
        "Scan": ([mine], 1, total(range(rank + 1), 1, kind)),
        "Exscan": ([mine], 1, total(range(rank), 1, kind) if rank else None),
        "Reduce_scatter_block": ([all_mine], 1, whole[rank]),
        "Reduce_scatter": ([all_mine, counts], 1, whole[rank]),
        "Allgather": ([mine], size, gathered),
        "Allgatherv": ([mine], size, gathered),
        "Alltoall": ([all_mine], size, crossed),
        "Alltoallv": ([all_mine], size, crossed),
        "Gather": ([mine], size, gathered if rank == 0 else None),
        "Gatherv": ([mine], size, gathered if rank == 0 else None),
        "Scatter": ([all_mine], 1, sent(0, size, kind).reshape(size, -1)[rank]),
        "Scatterv": ([all_mine], 1, sent(0, size, kind).reshape(size, -1)[rank]),
    }


def bits(items):
    return np.asarray(items).view(np.uint8)


@all_kinds
@pytest.mark.parametrize("memory", MEMORY)
@all_ways
def test_all_collectives_take_them_and_round_sums_once(comm, kind, memory, way):
    make = MEMORY[memory]
    for name, (given, blocks, wanted) in calls(comm, kind).items():
        there = [np.array(items) for items in given[:1]] + given[1:]
        received = np.zeros(COUNT * blocks, KINDS[kind])
        place = make(comm, received)
        run(comm, way, name, make(comm, there[0]), place, *there[1:])
        received = place if memory == "shared arrays" else received
        if wanted is not None:
            assert np.array_equal(bits(received), bits(wanted)), name
    buffer = sent(comm.rank, 1, kind)
    run(comm, way, "Bcast", tensor_of(buffer) if "tensors" in memory else buffer)
    assert np.array_equal(bits(buffer), bits(sent(0, 1, kind)))


def test_memory_is_there_by_their_names(comm):
    names = ("bfloat16", "torch.bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16))
    assert all(comm.empty(3, name).dtype == ml_dtypes.bfloat16 for name in names)
    assert comm.empty(3, "float8_e5m2").dtype == ml_dtypes.float8_e5m2
    assert comm.empty(3, "torch.float32").dtype == np.float32


@all_kinds
@pytest.mark.parametrize("algorithm", ["auto", "ring", "direct", "butterfly"])
def test_other_operations_and_lengths_in_place(comm, kind, algorithm):
    """Products of powers of two are exact."""
    for count in (0, 1, 1000):
        for op, function in (("MAX", np.max), ("MIN", np.min), ("PROD", np.prod)):
            everybody = [
                np.exp2(np.random.default_rng(rank).integers(-1, 2, count))
                for rank in range(comm.size)
            ]
            items = everybody[comm.rank].astype(KINDS[kind])
            where = tensor_of(items) if HAS_TORCH and comm.rank % 2 and count else items
            comm.Allreduce(MPI.IN_PLACE, where, op=getattr(MPI, op), algorithm=algorithm)
            assert np.array_equal(items.astype(float), function(everybody, axis=0))


@pytest.mark.parametrize(
    "kind", [k if k.endswith("16") else pytest.param(k, marks=pytest.mark.slow) for k in KINDS]
)
@pytest.mark.parametrize(
    "algorithm", ["auto", "ring", "butterfly", "direct", "circulant", "hierarchical"]
)
def test_what_one_rank_alone_would_lose_counts(comm, kind, algorithm):
    """1 and, of each other rank, half of the distance to the next number."""
    half = float(ml_dtypes.finfo(KINDS[kind]).eps) / 2
    for empty in (np.empty, comm.empty):
        items = empty(40, KINDS[kind])
        items[...] = 1 if comm.rank == 0 else half
        comm.Allreduce(MPI.IN_PLACE, items, algorithm=algorithm)
        exact = np.full(40, np.float32(1 + (comm.size - 1) * half)).astype(KINDS[kind])
        assert np.array_equal(bits(items), bits(exact))


@all_kinds
def test_reproducible_sums_are_exact(kind):
    with Communicator(MPI.COMM_WORLD, reproducible=True) as comm:
        items = sent(comm.rank, 1, kind)
        comm.Allreduce(MPI.IN_PLACE, tensor_of(items))
        assert np.array_equal(bits(items), bits(total(range(comm.size), 1, kind)))
        comm.Allreduce(MPI.IN_PLACE, items := sent(comm.rank, 1, kind), op=MPI.MAX)
        largest = np.max([sent(r, 1, kind).astype(float) for r in range(comm.size)], axis=0)
        assert np.array_equal(items.astype(float), largest)


@all_kinds
@all_ways
def test_native_reduces_no_numbers_that_mpi_does_not_have(comm, kind, way):
    """mpi4py has MPI add the bytes of such tensors."""
    items = np.ones(4, KINDS[kind])
    if kind == "float16":
        pytest.skip("MPI libraries have it")
    own = MPI.Op.Create(lambda a, b, kind: None)
    for name, blocks in (("Allreduce", 1), ("Reduce", 1), ("Scan", 1), ("Exscan", 1),
                         ("Reduce_scatter_block", comm.size)):  # fmt: skip
        mine = np.ones(4 * blocks, KINDS[kind])
        for given in ((mine, items), (tensor_of(mine), tensor_of(items))):
            for op in (MPI.SUM, MPI.MAX, MPI.BOR, own):
                with pytest.raises(InvalidBuffer, match=r"no type|no bitwise_or|MPI has none"):
                    run(comm, way, name, *given, op, algorithm="native")
            with pytest.raises(InvalidBuffer, match="MPI has none for"):
                run(comm, way, name, *given, own)
    own.Free()
    assert np.array_equal(items.astype(float), np.ones(4))
    run(comm, way, "Bcast", tensor_of(items), algorithm="native")
    run(comm, way, "Allgather", items, np.ones(4 * comm.size, KINDS[kind]), algorithm="native")


@pytest.mark.parametrize("kind", ["int1", "int4", "float8_e4m3b11fnuz", "float8_e8m0fnu"])
def test_other_types_of_ml_dtypes_are_no_types_of_mpi(comm, kind):
    """Their letters are those of other types of NumPy's, which MPI has."""
    ones = np.ones(64, getattr(ml_dtypes, kind))
    found = np.zeros(64, ones.dtype)
    comm.Allreduce(ones, found)
    expected = ones
    for _ in range(comm.size - 1):
        expected = expected + ones
    assert np.array_equal(found, expected)
    comm.Alltoall(np.resize(ones, comm.size), found[: comm.size])


@pytest.mark.parametrize("algorithm", ["auto", "native", "ring"])
def test_bytes_and_letters_have_bits_and_no_sums(comm, algorithm):
    """Some MPI libraries add them as small integers."""
    numbers = np.ones(3, np.float32)
    for spec in ([numbers, MPI.BYTE], [numbers, 12, MPI.CHAR], np.array([b"a", b"b"])):
        for op in (MPI.SUM, MPI.PROD, MPI.MAX, MPI.LOR):
            with pytest.raises(InvalidBuffer, match="MPI defines no"):
                comm.Allreduce(MPI.IN_PLACE, spec, op=op, algorithm=algorithm)
    assert np.array_equal(numbers, np.ones(3))
    comm.Allreduce(MPI.IN_PLACE, [numbers, MPI.BYTE], op=MPI.BOR, algorithm=algorithm)
    assert np.array_equal(numbers, np.ones(3))


@pytest.mark.parametrize("algorithm", ["auto", "native", "ring"])
def test_tensors_that_give_no_access_say_what_to_pass(comm, algorithm):
    torch = pytest.importorskip("torch", reason="torch is not installed: make test TORCH=1")
    columns = torch.ones(4, 4, dtype=torch.bfloat16)
    for tensor, way in (
        (columns[:, 1], r"tensor\.contiguous\(\), and copy it back"),
        (columns.float()[:, 1], r"tensor\.contiguous\(\), and copy it back"),
        (torch.ones(3, dtype=torch.complex64).conj(), r"tensor\.resolve_conj\(\)"),
        (torch._neg_view(torch.ones(3)), r"tensor\.resolve_neg\(\)"),
        (torch.ones(3, requires_grad=True), r"tensor\.detach\(\)"),
        (torch.ones(3, dtype=torch.complex32), "no type for numbers of torch.complex32"),
    ):
        with pytest.raises(InvalidBuffer, match=way):
            comm.Allreduce(MPI.IN_PLACE, tensor, algorithm=algorithm)


def test_without_ml_dtypes_sums_name_the_extra_and_copies_go_on(comm, monkeypatch):
    tensor = tensor_of(np.full(3, comm.rank + 1, ml_dtypes.bfloat16))
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    for algorithm in ("auto", "native", "ring"):
        with pytest.raises(InvalidBuffer, match=r"pip install ml_dtypes \(the extra 'bfloat16'\)"):
            comm.Allreduce(MPI.IN_PLACE, tensor, algorithm=algorithm)
    with pytest.raises(InvalidBuffer, match="the extra 'bfloat16'"):
        comm.empty(3, "bfloat16")
    comm.Bcast(tensor)
    assert tensor.tolist() == [1, 1, 1]
