"""Long reductions on the host are cut where their result comes to the start of a cache line."""

from itertools import product

import numpy as np
import pytest

from collectives.execution.memory import HOST

LONG = 40_000


def items(rng, dtype, nbytes, offset):
    """Drawn numbers that begin ``offset`` bytes behind the start of a cache line."""
    raw = np.zeros(nbytes + 192, np.uint8)
    start = -raw.ctypes.data % 64 + offset
    found = raw[start : start + nbytes].view(dtype)
    found[...] = rng.integers(-99, 99, found.size).astype(found.dtype)
    return found


@pytest.mark.parametrize("dtype", ["i1", "f2", "i4", "f8", "c16", "g"])
@pytest.mark.parametrize("into", ["another", "left", "right"])
def test_the_result_is_that_of_one_call(dtype, into):
    for offset, nbytes in product((0, 1, 4, 16, 40, 63), (64, LONG)):
        is_that_of_one_call(np.dtype(dtype), offset, nbytes, into)


def is_that_of_one_call(dtype, offset, nbytes, into):
    nbytes -= nbytes % dtype.itemsize
    rng = np.random.default_rng(offset)
    left = items(rng, dtype, nbytes, offset if into == "left" else 16)
    right = items(rng, dtype, nbytes, offset if into == "right" else 0)
    out = {"left": left, "right": right}.get(into)
    out = items(rng, dtype, nbytes, offset) if out is None else out
    wanted = np.subtract(left, right)
    calls, ends = [], []

    def subtract(left, right, /, *, out):
        calls.append(out.size)
        ends.append(out.ctypes.data % 64)
        np.subtract(left, right, out=out)

    assert HOST.reduction(subtract, left, right, out)() is None
    assert np.array_equal(out, wanted)
    assert sum(calls) == out.size
    can = nbytes > 64 and offset and offset % dtype.itemsize == 0
    assert ends == ([offset, 0] if can else [offset])
