"""Each fault in what orders a GPU's work is noticed on ranks, too, and nothing else is."""

import pytest
from mpi4py import MPI

from tests.mpi.collectives import device_scenarios
from tests.queued_cupy.mutants import ON_RANKS, mutated

pytestmark = pytest.mark.mpi

SEEDS = (None, 1)
SCENARIOS = sorted({mutant.scenario for mutant in ON_RANKS})


def is_right(scenario, scenarios):
    """Whether a scenario is, on all ranks and in all orders."""
    right = True
    for seed in SEEDS:
        with pytest.MonkeyPatch.context() as patch:
            try:
                right = getattr(scenarios, scenario)(patch, seed) and right
            except RuntimeError:  # of the machine's
                right = False
    return MPI.COMM_WORLD.allreduce(right, MPI.LAND)


@pytest.mark.quick_on(2)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_without_a_fault_all_is_right(scenario):
    assert is_right(scenario, device_scenarios)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", ON_RANKS, ids=lambda mutant: mutant.name)
def test_a_fault_is_noticed(mutant):
    if MPI.COMM_WORLD.size == 1 and mutant.scenario not in ("refused", "by_the_host"):
        pytest.skip("nobody to be too early for")
    with mutated(mutant) as load:
        assert not is_right(mutant.scenario, load("tests.mpi.collectives.device_scenarios"))
