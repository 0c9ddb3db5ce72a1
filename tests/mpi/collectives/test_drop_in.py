"""What the methods of ``MPI.Intracomm`` make of ours: ours, or mpi4py's own."""

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from tests.mpi.collectives.test_topologies import KINDS

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.quick_on(2, 3)]


def ended(made):
    """The communicator of a nonblocking call."""
    made[1].Wait()
    return made[0]


COMMUNICATORS = {make.__name__: make for make in KINDS} | {
    "Clone": lambda c: c.Clone(),
    "Dup": lambda c: c.Dup(),
    "Dup_with_info": lambda c: c.Dup_with_info(MPI.INFO_NULL),
    "Idup": lambda c: ended(c.Idup()),
    "Idup_with_info": lambda c: ended(c.Idup_with_info(MPI.INFO_NULL)),
    "Create": lambda c: c.Create(c.group),
    "Create_group": lambda c: c.Create_group(c.group),
    "Split": lambda c: c.Split(0, -c.rank),
    "Split_type": lambda c: c.Split_type(MPI.COMM_TYPE_SHARED),
    "Shrink": lambda c: c.Shrink(),
    "fromhandle": lambda c: type(c).fromhandle(c.Dup().handle),
    "f2py": lambda c: type(c).f2py(c.Dup().py2f()),
    "fromint": lambda c: type(c).fromint(c.Dup().toint()),
}
#: mpi4py's own come of these.
OTHERS = {
    "Create_intercomm": lambda c: c.Split(c.rank % 2, c.rank).Create_intercomm(
        0, c, 1 - c.rank % 2
    ),
    "Create_from_group": lambda c: type(c).Create_from_group(c.group),
    "Ishrink": lambda c: ended(c.Ishrink()),
    "Get_parent": lambda c: type(c).Get_parent(),
}


@pytest.fixture(scope="module")
def strict():
    with Communicator(MPI.COMM_WORLD, algorithm="ring", check=True) as made:
        yield made


@pytest.mark.parametrize("name", [*COMMUNICATORS, *OTHERS])
def test_what_is_made_of_ours_is_ours_or_mpi4pys(strict, name):
    try:
        made = (COMMUNICATORS | OTHERS)[name](strict)
    except (MPI.Exception, NotImplementedError):
        pytest.skip("this MPI has none")
    assert isinstance(made, Communicator) == (name in COMMUNICATORS)
    if name in COMMUNICATORS:
        handed_on = name not in ("fromhandle", "f2py", "fromint")
        assert not handed_on or made._engine.settings == strict._engine.resources.handed_on
        made.Allreduce(MPI.IN_PLACE, items := np.ones(3), algorithm="ring")
        assert (items == made.size).all()
        made.Free()
