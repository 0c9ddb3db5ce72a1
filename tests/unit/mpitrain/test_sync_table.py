"""What [sync] may say."""

import re

import msgspec
import pytest

from mpitrain.config import Config, Sync
from mpitrain.config.sync import Outer, parse_outer


def job(sync, **tables):
    return msgspec.convert({"sync": sync, **tables}, Config)


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
    ("text", "why"),
    [
        ("adam", "there is no 'adam'; there are plain, momentum, nesterov"),
        ("plain:lr=1", "'lr=1' is no option of plain, which has no options"),
        ("nesterov:rate=1", "'rate=1' is no option of nesterov, which has lr, momentum"),
        ("nesterov:lr", "'lr' is no option of nesterov"),
        ("nesterov:lr=0", "Expected `float` > 0"),
        ("nesterov:momentum=1", "Expected `float` < 1"),
        ("nesterov:lr=much", "Expected `float`"),
    ],
)
def test_outer_optimisers_that_cannot_be(text, why):
    with pytest.raises(msgspec.ValidationError, match=re.escape(why)):
        job({"kind": "local", "outer": text})


def test_a_delay_beyond_the_period_does_not_go_with_a_code():
    why = "set sync.delay to at most sync.period, or take another compress.codec"
    with pytest.raises(msgspec.ValidationError, match=re.escape(why)):
        job({"kind": "delayed", "period": 2, "delay": 3}, compress={"codec": "bf16"})


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
