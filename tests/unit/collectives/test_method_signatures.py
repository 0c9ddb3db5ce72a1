"""The nonblocking and persistent methods, which are made from the blocking ones."""

import inspect

import pytest
from mpi4py import MPI

from collectives import Communicator

BLOCKING = [
    *("Allreduce", "Reduce_scatter_block", "Reduce_scatter", "Scan", "Exscan", "Reduce"),
    *("Allgather", "Allgatherv", "Alltoall", "Alltoallv", "Bcast", "Barrier"),
    *("Gather", "Gatherv", "Scatter", "Scatterv"),
]


@pytest.mark.parametrize("name", BLOCKING)
@pytest.mark.parametrize("form", ["{0}", "I{1}", "{0}_init"])
def test_each_takes_what_mpi4pys_takes_and_an_algorithm(name, form):
    method = form.format(name, name.lower())
    ours, theirs = getattr(Communicator, method), getattr(MPI.Intracomm, method)
    wanted = [*inspect.signature(theirs).parameters, "algorithm"]
    assert [*inspect.signature(ours).parameters] == wanted
    assert ours.__name__ == method and ours.__doc__
