"""Who keeps the others waiting."""

import pytest

from mpitrain.training.account import slowest


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
