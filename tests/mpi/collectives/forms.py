"""A collective in MPI's three forms, and sums that say whether a communicator is well."""

import numpy as np
from mpi4py import MPI

from collectives import Communicator

#: Ways to make a call; ``None``, the plain one, as ``blocking``.
FORMS = ("blocking", "nonblocking", "persistent")


def run(comm, form, name, *given, **how):
    """Makes a call in one of these forms; returns the plan of a nonblocking one."""
    if form == "blocking":
        return getattr(comm, name)(*given, **how)
    if form == "nonblocking":
        request = getattr(comm, f"I{name.lower()}")(*given, **how)
        request.Wait()
        return request
    run_once(getattr(comm, f"{name}_init")(*given, **how))


def run_once(plan):
    plan.Start()
    plan.Wait()
    plan.Free()


def total(comm):
    """The sum of all ranks."""
    return comm.size * (comm.size - 1) // 2


def expect_sum(comm, items, algorithm=None, plus=0, form="blocking"):
    """The sum in place of ranks, each ``plus`` so many, is right."""
    items[...] = comm.rank + plus
    run(comm, form, "Allreduce", MPI.IN_PLACE, items, algorithm=algorithm)
    assert (items == total(comm) + plus * comm.size).all()


def fresh():
    """A communicator of a test's own: ``comm = pytest.fixture(fresh)``."""
    with Communicator(MPI.COMM_WORLD) as made:
        yield made


def expect_well(comm, algorithm="ring"):
    """The communicator's ranks are where they were, and nothing is left behind."""
    expect_sum(comm, np.zeros(100), algorithm)
