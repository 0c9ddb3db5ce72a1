"""Virtual time of a GPU: queues whose times are known by hand, and steps of a transformer."""

import numpy as np
import pytest
from msgspec.structs import replace

from collectives.algorithms import build
from collectives.execution.messages import Operands, bind
from collectives.execution.plan import Binding
from collectives.execution.transport.device import StagedTransport
from mpitrain.config import Parallel
from tests.gpu import virtual, virtual_card
from tests.gpu.timeline import Rates, Span, Timeline

#: Round numbers: seconds are those of what is queued alone.
ROUND = Rates(
    flops=2.0, wide_flops=1.0, memory=10.0, kernel=1.0, launch=0.0, call=0.0,
    bus=4.0, bus_latency=0.5, link=5.0, latency=0.25,
)  # fmt: skip


def test_a_stream_does_one_thing_after_the_other():
    t = Timeline(ROUND._replace(launch=0.5))
    t.kernel(0, "short", 1, 0, False)  # no shorter than the shortest
    t.kernel(0, "moves", 30, 0, False)
    t.kernel(0, "multiplies", 10, 8, False)
    t.kernel(0, "multiplies 32 bits", 10, 8, True)
    assert [span.end - span.start for span in t.spans] == [1, 3, 4, 8]
    assert [span.start for span in t.spans] == [0.5, 1.5, 4.5, 8.5]
    assert t.now == 2.0
    t.synchronize(0)
    assert t.now == 16.5 == t.spans[-1].end


def test_streams_wait_for_events_and_not_for_one_another():
    t = Timeline(ROUND)
    t.kernel(0, "a", 50, 0, False)
    event = t.mark(0)
    t.kernel(1, "b", 20, 0, False)
    t.follow(1, event)
    t.kernel(1, "c", 10, 0, False)
    assert [(s.start, s.end) for s in t.spans] == [(0, 5), (0, 2), (5, 6)]
    assert not t.ask(event)
    t.wait(event)
    assert t.ask(event)
    assert t.now == 5


def test_copies_share_a_way_of_the_bus_and_messages_the_link():
    t = Timeline(ROUND)
    t.copy(1, 6, "to host")
    t.copy(2, 6, "to host")
    t.copy(2, 2, "to device")
    assert [(s.start, s.end) for s in t.spans if "stream" in s.lane] == [(0, 2), (2, 4), (4, 5)]
    assert (t.busy("to host"), t.busy("to device")) == (4, 1)
    assert t.send(10) == (2, 2.25)
    assert t.send(5) == (3, 3.25)
    assert t.spans[-1] == Span("link", "message", 2, 3)


@pytest.fixture
def clock(monkeypatch):
    timeline = Timeline(ROUND._replace(call=0.02))  # in which a host that asks gets on
    virtual_card.install(monkeypatch, timeline)
    return timeline


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("road", ["direct", "staged"])
def test_a_ring_has_its_closed_form(clock, size, road):
    """2 (p-1) rounds, each a message of s/p bytes; half of them add it to what is there."""
    import cupy

    memory, mirror = virtual_card.VirtualMemory(0), virtual_card.Mirror(clock, size)
    transport = StagedTransport(mirror, memory) if road == "staged" else mirror
    part = 40
    items = cupy.empty(size * part // 4, np.float32)
    with memory.working():
        ring = build("allreduce", "ring", size)
        plan = bind(ring, transport, Operands(None, items), np.add, Binding(memory=memory))
    plan()
    plan.synchronize()
    message = part / ROUND.link + ROUND.latency
    added = 3 * part / ROUND.memory
    copies = 2 * (ROUND.bus_latency + part / ROUND.bus) if road == "staged" else 0
    assert clock.now == pytest.approx((size - 1) * (2 * (message + copies) + added), rel=0.03)


@pytest.mark.slow
def test_sums_are_hidden_where_they_can_be(tmp_path):
    """A link that takes no time costs nothing; one that takes more than the step cannot be hidden;
    in between, what overlaps is no slower than what does not."""
    config = virtual.job(tmp_path, 2, 64, 16, 2)
    rates = Rates(launch=1e-7, call=1e-6)
    alone, _ = virtual.steps(config, rates, 1, "direct")
    for link, least, most in ((1e15, 1.0, 1.2), (1e8, 5.0, 1e9)):
        behind, today = virtual.steps(config, rates._replace(link=link, latency=0.0), 4, "direct")
        assert least * alone <= behind <= most * alone
        assert alone <= today <= behind * 1.001


def test_most_of_the_sums_is_hidden(tmp_path):
    """Of buckets that all start long before the GPU comes to them."""
    config = virtual.job(tmp_path, 8, 64, 32, 4)
    config = replace(config, parallel=Parallel(bucket_bytes=1 << 18))
    rates = Rates(launch=1e-7, call=1e-6, flops=2e10, wide_flops=2e10, link=2e9)
    alone, _ = virtual.steps(config, rates, 1, "direct")
    behind, today = virtual.steps(config, rates, 4, "direct")
    assert behind - alone > 0.05 * alone
    assert today - alone < 0.4 * (behind - alone)
