"""A slower link: what its text says, and when messages leave and arrive on it."""

import pickle
from math import inf
from types import SimpleNamespace

import pytest
from mpi4py import MPI

from collectives.calls.settings import Settings
from collectives.execution.transport.checked import CheckedTransport
from collectives.execution.transport.delayed import Adapter, DelayedTransport, Link, delayed


class Derived(delayed("home")):
    """A program's own."""


@pytest.mark.parametrize("made", [delayed("far"), delayed("home"), DelayedTransport, Derived])
def test_transports_are_pickled(made):
    assert pickle.loads(pickle.dumps(Settings(transport=made))).transport is made


@pytest.mark.parametrize(
    ("text", "latency", "bandwidth"),
    [
        ("cluster", (1e-6, 1e-6), 100e9),
        ("home", (1e-3, 10e-3), 100e6),
        ("far", (0.162, 0.2), 100e6),
        ("latency=100ms,bandwidth=100Mb/s", (0.1, 0.1), 1e8),
        ("bandwidth=2.5Gb/s", (0.0, 0.0), 2.5e9),
        ("latency=1ms..10ms", (1e-3, 1e-2), inf),
        ("home, latency=20us", (2e-5, 2e-5), 100e6),
        ("latency=2s,bandwidth=64kb/s", (2.0, 2.0), 64e3),
    ],
)
def test_texts(text, latency, bandwidth):
    link = Link.read(text)
    assert link.latency == pytest.approx(latency) and link.bandwidth == bandwidth
    again = Link.read(str(link))
    assert again.latency == pytest.approx(latency) and again.bandwidth == bandwidth


@pytest.mark.parametrize(
    "text", ["", "moon", "latency=1", "latency=-1ms", "bandwidth=100MB/s", "far,home", "speed=1s",
             "bandwidth=0Mb/s", "latency=9ms..1ms"],
)  # fmt: skip
def test_texts_that_are_none(text):
    with pytest.raises(ValueError, match=r"is no part of a link|must be above 0|the least first"):
        Link.read(text)


def test_what_is_sent_leaves_one_after_the_other():
    adapter = Adapter(Link((0.5, 0.5), 8000.0))
    assert adapter.send(1000, 10.0) == (11.0, 11.5)
    assert adapter.send(500, 10.25) == (11.5, 12.0)
    assert adapter.send(500, 20.0) == (20.5, 21.0)
    drawn = Adapter(Link((0.01, 0.05)))
    latencies = {drawn.send(9, 10.0)[1] - 10.0 for _ in range(40)}
    assert 0.0099 < min(latencies) < 0.02 and 0.04 < max(latencies) < 0.0501


def test_what_comes_at_the_same_time_arrives_one_after_the_other():
    adapter = Adapter(Link((0.5, 0.5), 8000.0))
    assert adapter.receive(1000, 11.5) == 11.5
    assert adapter.receive(1000, 11.5) == 12.5
    assert adapter.receive(500, 20.0) == 20.0
    # It was seen late, and was there before the last one.
    assert adapter.receive(1000, 14.0) == 14.0
    assert adapter.receive(0, 1.0) == 1.0


def test_a_test_does_not_wait_for_a_message_on_its_way():
    on_its_way = SimpleNamespace(
        request=MPI.REQUEST_NULL,
        envelope=SimpleNamespace(is_there=lambda: False),
        check=lambda: pytest.fail("it waits"),
    )
    assert not DelayedTransport.testall([on_its_way])


def test_the_environment_names_a_link(monkeypatch):
    monkeypatch.delenv("COLLECTIVES_CHECKSUMS", raising=False)
    monkeypatch.setenv("COLLECTIVES_LINK", "latency=100ms,bandwidth=100Mb/s")
    given = Settings.given("auto")
    assert given.transport is delayed("latency=100ms,bandwidth=100Mb/s")
    assert given.needs_messages and not given.has_checksums
    monkeypatch.setenv("COLLECTIVES_LINK", "wormhole")
    with pytest.raises(ValueError, match=r"^COLLECTIVES_LINK='wormhole': 'wormhole' is no part of"):
        Settings.given("auto")
    monkeypatch.setenv("COLLECTIVES_LINK", "far")
    monkeypatch.setenv("COLLECTIVES_CHECKSUMS", "1")
    with pytest.raises(ValueError, match="unset one of the two"):
        Settings.given("auto")
    monkeypatch.delenv("COLLECTIVES_LINK")
    assert Settings.given("auto").transport is CheckedTransport
