"""Drawn programs judge the shadow: it lets be what is right, and tells planted mistakes."""

import pytest
from mpi4py import MPI

from tests.cases import slow_case
from tests.zoo.__main__ import table, verdicts
from tests.zoo.mistakes import KINDS

#: Kinds with ways that these samples of the first steps may not show.
SILENT = {"branch by the batch"}


@pytest.mark.parametrize("count", [2, slow_case(200)])
def test_drawn_programs_train_as_plain_torch_or_are_told(count):
    found = list(verdicts(MPI.COMM_SELF, 1, range(count), list(KINDS)))
    assert not [one for one in found if one.right], table(found)
    silent = {one.kind for one in found if one.planted == "silent"}
    assert silent <= SILENT, [one for one in found if one.planted == "silent"]
