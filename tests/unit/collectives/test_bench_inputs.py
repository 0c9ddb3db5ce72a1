"""Sizes, lists of algorithms, and data whose reduction is predictable."""

import numpy as np
import pytest

from collectives.bench import inputs
from collectives.commands import arguments, bench
from collectives.execution.memory import OPERATIONS


def test_sizes():
    found = [arguments.size(text) for text in ("8", "4K", "64M", "2GiB")]
    assert found == [8, 4096, 1 << 26, 2 << 30]


def test_steps_end_with_the_largest():
    assert list(inputs.sizes(8, 100, 4, None)) == [8, 32, 100]
    assert list(inputs.sizes(8, 128, 4, None)) == [8, 32, 128]
    assert list(inputs.sizes(10, 30, 4, 10)) == [10, 20, 30]
    with pytest.raises(ValueError, match="factor of at least 2"):
        list(inputs.sizes(8, 128, 1, None))


def test_native_is_always_measured():
    assert bench.algorithms("allreduce", "ring", 2) == ["ring", "native"]
    assert bench.algorithms("allreduce", "native,ring", 2) == ["native", "ring"]
    assert "native" in bench.algorithms("alltoall", "all", 2)


def test_commas_within_options():
    several = ["ring", "parameter_server:servers=2", "native"]
    assert arguments.split(",".join(several)) == several


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "half", "float", "bfloat16"])
@pytest.mark.parametrize("op", ["sum", "prod", "max", "min"])
def test_reductions_are_exact_in_any_order(op, dtype):
    kind = inputs.parse_dtype(dtype)
    size, n = 9, 200
    predicted = inputs.expected("allreduce", op, kind, 0, size, n)
    backwards = inputs.crafted("allreduce", op, kind, size - 1, size, n)
    for rank in reversed(range(size - 1)):
        backwards = OPERATIONS[op][0](
            inputs.crafted("allreduce", op, kind, rank, size, n), backwards
        )
    assert np.array_equal(predicted.view(np.uint8), backwards.astype(kind).view(np.uint8))
    assert len(np.unique(predicted)) > 1


def test_every_rank_sends_something_else():
    sent = [inputs.crafted("alltoall", "sum", np.dtype("i4"), r, 4, 64) for r in range(4)]
    assert all(not np.array_equal(sent[0], other) for other in sent[1:])
