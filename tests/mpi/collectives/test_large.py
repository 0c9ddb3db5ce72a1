"""Messages that 32 bits cannot count; slow, and several GiB."""

import numpy as np
import pytest
from mpi4py import MPI

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
ITEMS = (1 << 31) + 5


@pytest.mark.parametrize("algorithm", ["butterfly", "auto"])
def test_more_items_than_31_bits_count(comm, algorithm):
    if comm.size != 2:
        pytest.skip("2 ranks fill the memory")
    items = np.zeros(ITEMS, np.int8)
    items[[0, ITEMS // 2, ITEMS - 1]] = 1 + comm.rank
    comm.Allreduce(MPI.IN_PLACE, items, algorithm=algorithm)
    assert items[[0, ITEMS // 2, ITEMS - 1]].tolist() == [3, 3, 3]
    assert np.count_nonzero(items) == 3
