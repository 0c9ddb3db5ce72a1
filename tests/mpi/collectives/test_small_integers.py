"""Integers of 8 and 16 bits wrap round as NumPy's do, whatever the MPI library's own sums do."""

import numpy as np
import pytest
from mpi4py import MPI

from tests.mpi.collectives.forms import FORMS, run

pytestmark = pytest.mark.mpi

OPS = {"SUM": np.add, "PROD": np.multiply, "MAX": np.maximum, "BXOR": np.bitwise_xor}
TYPES = {
    "int8": (MPI.SIGNED_CHAR, MPI.INT8_T),
    "uint8": (MPI.UNSIGNED_CHAR, MPI.UINT8_T),
    "int16": (MPI.SHORT, MPI.INT16_T),
    "uint16": (MPI.UNSIGNED_SHORT, MPI.UINT16_T),
}
CALLS = ("Allreduce", "Reduce", "Scan", "Exscan", "Reduce_scatter_block", "Reduce_scatter")


def drawn(seed, rank, count, dtype):
    of_rank, info = np.random.default_rng([seed, rank]), np.iinfo(dtype)
    return of_rank.integers(info.min, info.max, count, dtype, endpoint=True)


def described(rng, items):
    """The memory in one of mpi4py's forms; the ranks need not choose the same."""
    name = items.dtype.name
    forms = [
        items,
        [items, TYPES[name][rng.integers(2)]],
        [items, items.dtype.char],
        [items, MPI.Datatype(TYPES[name][0])],
        memoryview(items),
        [MPI.buffer.fromaddress(items.ctypes.data, items.nbytes), TYPES[name][1]],
    ]
    return forms[rng.integers(len(forms))]


def wanted(name, op, seed, comm, count, dtype):
    """What this rank gets, by NumPy's arithmetic in rank order."""
    blocks = comm.size if name.startswith("Reduce_scatter") else 1
    every = [drawn(seed, rank, count * blocks, dtype) for rank in range(comm.size)]
    last = {"Scan": comm.rank + 1, "Exscan": comm.rank}.get(name, comm.size)
    if not last or (name == "Reduce" and comm.rank != comm.size - 1):
        return None
    whole = OPS[op].reduce(every[:last], axis=0, dtype=dtype)
    return whole.reshape(blocks, count)[comm.rank if blocks > 1 else 0]


def check(comm, seed, count):
    """One drawn call."""
    rng, own = np.random.default_rng(seed), np.random.default_rng([seed, comm.rank])
    name, dtype = rng.choice(CALLS), np.dtype(str(rng.choice([*TYPES])))
    op, form = str(rng.choice([*OPS], p=[0.6, 0.2, 0.1, 0.1])), str(rng.choice(FORMS))
    is_shared, in_place = bool(rng.integers(2)), bool(rng.integers(2))
    blocks = comm.size if name.startswith("Reduce_scatter") else 1
    mine = drawn(seed, comm.rank, count * blocks, dtype)
    make = comm.empty if is_shared else np.empty
    send, recv = make(count * blocks, dtype), make(count * blocks, dtype)
    send[:], recv[:] = mine, mine if in_place else 1
    sent, into = described(own, send), described(own, recv if in_place else recv[:count])
    given = [MPI.IN_PLACE if in_place else sent, into]
    if name == "Reduce" and comm.rank != comm.size - 1:
        given = [sent, None]
    if name == "Reduce_scatter":
        given.append([count] * comm.size)
    how = {"op": getattr(MPI, op), **({"root": comm.size - 1} if name == "Reduce" else {})}
    run(comm, form, name, *given, **how)
    expected = wanted(name, op, seed, comm, count, dtype)
    about = (seed, name, dtype.name, op, form, count, is_shared, in_place, comm.last_plan)
    if expected is not None:
        np.testing.assert_array_equal(recv[:count], expected, err_msg=str(about))


@pytest.mark.parametrize("count", [*range(1, 71, 3), 100_003])
def test_a_drawn_reduction_has_the_numbers_of_numpy(comm, count):
    """A library's loop may saturate where the rest of the items wraps."""
    for seed in range(4):
        check(comm, 1000 * seed + count, count)
