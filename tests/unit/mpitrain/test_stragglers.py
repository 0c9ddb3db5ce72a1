"""Who keeps the others waiting."""

import numpy as np
import pytest

from mpitrain.training.account import Account, slowest


@pytest.mark.parametrize(
    ("seconds", "peers", "found"),
    [
        ([1.0, 1.0, 1.0, 1.0], [0] * 4, None),
        ([1.0, 1.0, 2.0, 1.0], [0] * 4, (2, 2.0)),
        ([1.0, 1.4, 1.0], [0] * 3, None),  # not yet 1.5 times
        ([0.01, 0.05, 0.01], [0] * 3, None),  # not worth a word
        ([1.0, 3.0], [0] * 2, (1, 3.0)),
        ([1.0, 1.0, 9.0, 9.0], [0, 0, 1, 1], None),  # the other stage has more to do
        ([1.0, 2.0, 9.0, 27.0], [0, 0, 1, 1], (3, 3.0)),
        ([5.0], [0], None),
        ([1.0, 5.0], [0, 1], None),
    ],
)
def test_the_slowest(seconds, peers, found):
    assert slowest(seconds, peers) == found


@pytest.mark.parametrize("shares", [False, True])
def test_nobody_is_accused_where_ranks_share_cores(shares):
    account = object.__new__(Account)
    account.spent = np.zeros(2)
    account._ranks = [(0, "a", shares), (0, "a", shares)]
    assert (account.straggler(7, np.array([1.0, 3.0])) is None) == shares
