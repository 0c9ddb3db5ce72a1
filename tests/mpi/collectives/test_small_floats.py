"""Floating-point numbers of 16 and 8 bits, most of which neither NumPy nor MPI has."""

import sys

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from collectives import InvalidBuffer
from tests.cases import mostly_slow
from tests.mpi.collectives.forms import FORMS, run, tensor_of
from tests.mpi.collectives.test_drawn import NARROW


def test_memory_is_there_by_their_names(comm):
    names = ("bfloat16", "torch.bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16))
    assert all(comm.empty(3, name).dtype == ml_dtypes.bfloat16 for name in names)
    assert comm.empty(3, "float8_e5m2").dtype == ml_dtypes.float8_e5m2
    assert comm.empty(3, "torch.float32").dtype == np.float32


@pytest.mark.parametrize("kind", mostly_slow(NARROW[1:], [ml_dtypes.bfloat16]))
@pytest.mark.parametrize("way", mostly_slow(FORMS, FORMS[:1]))
def test_native_reduces_no_numbers_that_mpi_does_not_have(comm, kind, way):
    """mpi4py has MPI add the bytes of such tensors."""
    items = np.ones(4, kind)
    own = MPI.Op.Create(lambda a, b, kind: None)
    for name, blocks in (("Allreduce", 1), ("Reduce", 1), ("Scan", 1), ("Exscan", 1),
                         ("Reduce_scatter_block", comm.size)):  # fmt: skip
        mine = np.ones(4 * blocks, kind)
        for given in ((mine, items), (tensor_of(mine), tensor_of(items))):
            for op in (MPI.SUM, MPI.MAX, MPI.BOR, own):
                with pytest.raises(InvalidBuffer, match=r"no type|no bitwise_or|MPI has none"):
                    run(comm, way, name, *given, op, algorithm="native")
            with pytest.raises(InvalidBuffer, match="MPI has none for"):
                run(comm, way, name, *given, own)
    own.Free()
    assert np.array_equal(items.astype(float), np.ones(4))
    run(comm, way, "Bcast", tensor_of(items), algorithm="native")
    run(comm, way, "Allgather", items, np.ones(4 * comm.size, kind), algorithm="native")


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
