"""Every collective by every algorithm, on both kinds of memory, over real ranks."""

import hashlib
import zlib

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from collectives import InvalidBuffer
from collectives.algorithms import names
from collectives.contracts import CONTRACTS, Member, contract
from tests.local.references import reference
from tests.mpi.collectives.forms import FORMS, run

pytestmark = pytest.mark.mpi

ALLREDUCES = [*names("allreduce"), "native", "auto"]
EVERYTHING = [
    (collective, algorithm)
    for collective in CONTRACTS
    if collective != "barrier"  # which has a test of its own
    for algorithm in (*names(collective), "native", "auto")
]


def sent(collective, comm, count, dtype, rank, root=0, seed=0):
    """What ``rank`` sends: whole numbers whose sums every type represents."""
    items = count * contract(collective).send_blocks(Member(rank, comm.size, root))
    return np.random.default_rng([seed, rank]).integers(0, 8, items).astype(dtype)


def wanted(collective, comm, count, dtype, root=0, seed=0):
    """What this rank must receive; ``None`` if nothing."""
    everybody = [sent(collective, comm, count, dtype, r, root, seed) for r in range(comm.size)]
    found = reference(collective, everybody, comm.rank, root)
    return None if found is None else found.astype(dtype)


class Pool:
    """Arrays out of one piece of shared memory, so that ranks may take different numbers."""

    def __init__(self, memory):
        self.memory = memory
        self.used = 0

    def empty(self, size, dtype):
        nbytes = size * np.dtype(dtype).itemsize
        self.used += nbytes
        return self.memory[self.used - nbytes : self.used].view(dtype)


#: Methods that are not called as their collective.
NAMES = {"reduce_scatter": "Reduce_scatter_block", "broadcast": "Bcast"}


def call(comm, collective, sendbuf, recvbuf, algorithm, root=0, form="blocking"):
    keywords = {"root": root} if contract(collective).rooted else {}
    given = [recvbuf] if collective == "broadcast" else [sendbuf, recvbuf]
    name = NAMES.get(collective, collective.capitalize())
    run(comm, form, name, *given, algorithm=algorithm, **keywords)


def check(
    comm, collective, algorithm, count, dtype, in_place, empty, seed=0, root=0, form="blocking"
):
    """One call on fresh buffers, compared with the reference bit by bit."""
    blocks, member = contract(collective), Member(comm.rank, comm.size, root)
    mine = sent(collective, comm, count, dtype, comm.rank, root, seed)
    expected = wanted(collective, comm, count, dtype, root, seed)
    where = (collective, algorithm, count, root, form)
    recvbuf = empty(count * blocks.recv_blocks(member), dtype)
    recvbuf[...] = 77
    in_place = in_place or collective == "broadcast"
    place = blocks.place(member) if in_place and blocks.in_place is not None else None
    if in_place and collective == "scatter" and comm.rank == root:
        sendbuf = empty(mine.size, dtype)
        sendbuf[...] = mine
        call(comm, collective, sendbuf, MPI.IN_PLACE, algorithm, root, form)
        assert np.array_equal(sendbuf, mine), where
        return
    if place is not None:
        recvbuf[place * count :][: mine.size] = mine
        call(comm, collective, MPI.IN_PLACE, recvbuf, algorithm, root, form)
    elif in_place and collective == "reduce_scatter":
        both = empty(mine.size, dtype)
        both[...] = mine
        call(comm, collective, MPI.IN_PLACE, both, algorithm, root, form)
        recvbuf = both[:count]
    else:
        sendbuf = empty(mine.size, dtype)
        sendbuf[...] = mine
        has_send, has_recv = blocks.send_blocks(member), blocks.recv_blocks(member)
        call(
            comm,
            collective,
            sendbuf if has_send else None,
            recvbuf if has_recv else None,
            algorithm,
            root,
            form,
        )
        assert np.array_equal(sendbuf, mine), where
    if expected is not None:
        assert np.array_equal(recvbuf, expected), where


@pytest.mark.parametrize("in_place", [False, True], ids=["out", "in"])
@pytest.mark.parametrize(("collective", "algorithm"), EVERYTHING)
def test_every_count(comm, collective, algorithm, in_place):
    for count in (0, 1, comm.size - 1, 3 * comm.size + 2, 5000):
        check(comm, collective, algorithm, count, np.float32, in_place, np.empty)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("collective", ["broadcast", "reduce", "gather", "scatter"])
def test_every_root(comm, collective, form):
    pool = Pool(comm.empty(1 << 12, np.uint8))
    segments = ["chain:segments=3"] if collective == "broadcast" else []
    for algorithm in (*names(collective), *segments, "native", "auto"):
        for root in range(comm.size):
            for empty in (np.empty, pool.empty):
                pool.used = 0
                check(comm, collective, algorithm, 5, "i4", root % 2, empty, root=root, form=form)


@pytest.mark.parametrize(("collective", "algorithm"), EVERYTHING)
def test_shared_memory(comm, collective, algorithm):
    pool = Pool(comm.empty(1 << 20, np.uint8))
    for count in (0, 1, comm.size + 1, 4000):
        for in_place in (False, True):
            pool.used = 0
            check(comm, collective, algorithm, count, np.float64, in_place, pool.empty)


@pytest.mark.quick_on(2)
@pytest.mark.parametrize("algorithm", ALLREDUCES)
def test_large_segments_in_shared_memory(comm, algorithm):
    """Long enough to be cut into several segments on every rank."""
    count = (3 << 20) // 4 * comm.size + 1
    array = comm.empty(count, np.float32)
    for turn in range(2):
        array[...] = np.arange(count) % 11 + comm.rank + turn
        comm.Allreduce(MPI.IN_PLACE, array, algorithm=algorithm)
        total = comm.size * (np.arange(count) % 11 + turn) + comm.size * (comm.size - 1) // 2
        assert np.array_equal(array, total)


@pytest.mark.parametrize("memory", ["numpy", "shared"])
@pytest.mark.parametrize("algorithm", [*names("allreduce"), "auto"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.complex128])
def test_replicas_are_bitwise_equal(comm, algorithm, dtype, memory):
    fractions = np.random.default_rng(comm.rank).random(1003) * 10.0 ** (comm.rank % 3)
    mine = (comm.empty if memory == "shared" else np.empty)(1003, dtype)
    mine[...] = fractions
    comm.Allreduce(MPI.IN_PLACE, mine, algorithm=algorithm)
    digests = comm.allgather(hashlib.blake2b(mine.tobytes()).hexdigest())
    assert set(digests) == {digests[0]}
    exact = np.sum(comm.allgather(fractions.astype(dtype).astype(np.complex128)), axis=0)
    assert np.allclose(mine, exact, rtol=2e-2 if dtype == np.float16 else 1e-5)


INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
REALS = ["float16", "float32", "float64", "longdouble", ml_dtypes.bfloat16]
DEFINED = {
    "SUM": (np.add, [*INTEGERS, *REALS, "complex64", "complex128"]),
    "PROD": (np.multiply, [*INTEGERS, *REALS, "complex64", "complex128"]),
    "MAX": (np.maximum, [*INTEGERS, *REALS]),
    "MIN": (np.minimum, [*INTEGERS, *REALS]),
    "LAND": (np.logical_and, [*INTEGERS, "bool"]),
    "LOR": (np.logical_or, [*INTEGERS, "bool"]),
    "LXOR": (np.logical_xor, [*INTEGERS, "bool"]),
    "BAND": (np.bitwise_and, INTEGERS),
    "BOR": (np.bitwise_or, INTEGERS),
    "BXOR": (np.bitwise_xor, INTEGERS),
}


@pytest.mark.parametrize("name", DEFINED)
@pytest.mark.parametrize("algorithm", ["ring", "butterfly", "auto"])
def test_every_operation_on_every_type(comm, name, algorithm):
    reduce, types = DEFINED[name]
    for kind in types:
        dtype = np.dtype(kind)
        everybody = [
            (np.arange(37) * (rank + 3) // 2 % 3).astype(dtype) for rank in range(comm.size)
        ]
        total = everybody[0]
        for items in everybody[1:]:
            total = reduce(total, items).astype(dtype)
        result = np.empty_like(total)
        comm.Allreduce(everybody[comm.rank], result, op=getattr(MPI, name), algorithm=algorithm)
        assert np.array_equal(result, total), dtype


@pytest.mark.parametrize(
    ("name", "kind"),
    [("MAX", "complex64"), ("BAND", "float32"), ("LOR", "float64"), ("SUM", "bool"), ("SUM", "V8")],
)
def test_operations_that_mpi_does_not_define(comm, name, kind):
    array = np.zeros(4, kind)
    with pytest.raises(InvalidBuffer, match=rf"on \|?{kind}"):
        comm.Allreduce(MPI.IN_PLACE, array, op=getattr(MPI, name), algorithm="ring")


def test_nan_reaches_every_rank(comm):
    array = np.array([np.nan if comm.rank == 0 else 1.0, float(comm.rank)])
    for op, last in ((MPI.MAX, comm.size - 1), (MPI.MIN, 0)):
        result = np.empty_like(array)
        comm.Allreduce(array, result, op=op, algorithm="ring")
        assert np.isnan(result[0])
        assert result[1] == last


@pytest.mark.parametrize("algorithm", ["ring", "butterfly", "direct", "double_binary_tree"])
def test_maxloc(comm, algorithm):
    pair = np.zeros(3, [("value", "f4"), ("rank", "i4")])
    pair["value"] = [comm.rank, -comm.rank, 5]
    pair["rank"] = comm.rank
    result = np.zeros_like(pair)
    comm.Allreduce(
        [pair, 3, MPI.FLOAT_INT], [result, 3, MPI.FLOAT_INT], op=MPI.MAXLOC, algorithm=algorithm
    )
    assert result["value"].tolist() == [comm.size - 1, 0, 5]
    assert result["rank"].tolist() == [comm.size - 1, 0, 0]


def test_a_drawn_sweep(comm):
    """Cases that every rank draws alike."""
    sweep(comm, 300, zlib.crc32(b"sweep"))


@pytest.mark.slow
def test_thousands_of_drawn_cases(comm):
    sweep(comm, 4000, zlib.crc32(b"thousands"))


def sweep(comm, cases, seed):
    rng = np.random.default_rng(seed)
    pool = Pool(comm.empty(1 << 15, np.uint8))
    for case in range(cases):
        collective, algorithm = EVERYTHING[rng.integers(len(EVERYTHING))]
        count = int(rng.choice([0, 1, 2, 3, 7, 16, 61]))
        dtype = np.dtype(rng.choice(["int32", "float32", "float64", "complex64"]))
        in_place, in_window = (bool(b) for b in rng.integers(2, size=2))
        root, form = int(rng.integers(comm.size)), FORMS[rng.integers(3)]
        pool.used = 0
        empty = pool.empty if in_window else np.empty
        check(comm, collective, algorithm, count, dtype, in_place, empty, case, root, form)
