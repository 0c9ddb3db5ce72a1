"""A SLURM of two nodes, for the tests of a module, and two hosts."""

import subprocess

import pytest

from tests.cluster.hosts import NoHosts, hosts
from tests.cluster.slurm import NoSlurm, slurm


@pytest.fixture(scope="module")
def cluster():
    try:
        with slurm(nodes=2) as up:
            yield up
    except NoSlurm as error:
        pytest.skip(str(error))


@pytest.fixture
def two_hosts():
    try:
        with hosts(2) as up:
            yield up
    except NoHosts as error:
        pytest.skip(str(error))
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True)
    assert up.prefix not in left.stdout
