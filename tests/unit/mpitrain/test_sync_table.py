"""Settings of [sync]."""

import pytest

from mpitrain.config import Sync
from mpitrain.config.sync import Outer, parse_outer


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("plain", ("plain", Outer(1.0, 0.0))),
        ("nesterov", ("nesterov", Outer(0.7, 0.9))),
        ("nesterov:lr=0.5", ("nesterov", Outer(0.5, 0.9))),
        ("momentum:momentum=0.5,lr=2", ("momentum", Outer(2.0, 0.5))),
    ],
)
def test_outer_optimisers(text, found):
    assert parse_outer(text) == found


@pytest.mark.parametrize(
    "sync",
    [
        Sync("local", period=3, start=2),
        Sync("delayed", period=2, delay=5),
        Sync("delayed", period=1, delay=1, start=3),
        Sync(),
    ],
)
def test_exchanges_are_those_that_a_run_has_counted(sync):
    found = since = 0
    for step in range(1, 40):
        began = step - sync.start - sync.delay
        exchanges = began > 0 and began % sync.period == 0
        exchanges |= step <= sync.start or not sync.drifts
        found, since = found + exchanges, 0 if exchanges else since + 1
        assert sync.exchanges(step) == (found, since)
