"""Each fault in what orders a GPU's work is noticed, and nothing is where there is none."""

import pytest

from tests.local import device_scenarios
from tests.queued_cupy.mutants import ALONE, mutated

SEEDS = (None, 1, 2)
SCENARIOS = sorted({mutant.near for mutant in ALONE})


def is_right(scenario, scenarios):
    """Whether a scenario is, in all orders."""
    for seed in SEEDS:
        with pytest.MonkeyPatch.context() as patch:
            if not getattr(scenarios, scenario)(patch, seed):
                return False
    return True


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_without_a_fault_all_is_right(scenario):
    assert is_right(scenario, device_scenarios)


@pytest.mark.slow  # the scenarios themselves are above
@pytest.mark.parametrize("mutant", ALONE, ids=lambda mutant: mutant.name)
def test_a_fault_is_noticed(mutant):
    with mutated(mutant) as load:
        try:
            noticed = not is_right(mutant.near, load("tests.local.device_scenarios"))
        except (RuntimeError, AssertionError, TypeError):
            noticed = True
    assert noticed
