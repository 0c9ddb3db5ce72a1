"""Types that mpi4py has names for, and this MPI not."""

from types import SimpleNamespace

import pytest
from mpi4py import MPI

from collectives.calls import mpi4py_spec
from collectives.calls.mpi4py_spec import PREDEFINED, named_type
from collectives.errors import InvalidBuffer


@pytest.mark.parametrize(
    ("handle", "name"), [(0, "MPI_SHORT_FLOAT"), (MPI.FLOAT.handle, "")], ids=["Open MPI", "MPICH"]
)
def test_one_without_a_handle_or_a_name_is_none_of_this_mpi(handle, name):
    assert not mpi4py_spec._is_whole(SimpleNamespace(handle=handle, name=name))


def test_one_that_this_mpi_lacks_is_refused_by_name():
    lacking = [
        found
        for found in vars(MPI).values()
        if isinstance(found, MPI.Datatype) and found.handle not in PREDEFINED
    ]
    assert MPI.DATATYPE_NULL in lacking
    for datatype in lacking:
        with pytest.raises(InvalidBuffer, match="a datatype that this MPI does not have"):
            named_type(datatype, "send")
