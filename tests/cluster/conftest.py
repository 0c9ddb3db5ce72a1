"""A SLURM of two nodes, for the tests of a module."""

import pytest

from tests.cluster.slurm import NoSlurm, slurm


@pytest.fixture(scope="module")
def cluster():
    try:
        with slurm(nodes=2) as up:
            yield up
    except NoSlurm as error:
        pytest.skip(str(error))
