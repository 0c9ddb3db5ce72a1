"""Overlap or none: steps of each in turn, and the better stays."""

import pytest

from mpitrain.parallel.overlap_trial import OverlapTrial


@pytest.mark.parametrize("faster", [True, False])
def test_the_faster_way_stays(faster):
    trial, ways = OverlapTrial(), []
    while not trial.decided:
        ways.append(trial.overlap)
        # The first steps are slow, and one in the middle.
        slow = 9.0 if len(ways) in (1, 2, 7) else 0.0
        if trial.tell(slow + (1.0 if trial.overlap == faster else 1.1)):
            trial.decide(*trial.seconds)
    assert ways == [True, False] * 6
    assert trial.overlap is faster
    assert trial.seconds == ((1.0, 1.1) if faster else (1.1, 1.0))
    assert not trial.tell(100.0)
    assert trial.overlap is faster
