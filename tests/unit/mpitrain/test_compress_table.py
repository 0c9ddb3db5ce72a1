"""Values that [compress] takes."""

import re

import msgspec
import numpy as np
import pytest

from collectives.codec import Residual
from mpitrain.commands.plan import explain
from mpitrain.compress import parse
from mpitrain.config import Compress, Config, ConfigError
from mpitrain.search.machine import Machine
from mpitrain.training.build import compression

SGD = {"name": "sgd", "momentum": 0.0}
LOCAL = {"kind": "local", "period": 5}


def job(codec, sync=None, optim=None, parallel=None, **how):
    tables = {"sync": sync or {}, "optim": optim or {}, "parallel": parallel or {}}
    return msgspec.convert({"compress": {"codec": codec, **how}, **tables}, Config)


@pytest.mark.parametrize(
    ("codec", "more", "why"),
    [
        ("none", {"start": 3}, "name a codec"),
        ("nosuch", {}, "there is no codec 'nosuch'"),
        ("auto", {}, "there is no codec 'auto'"),
        ("powersgd", {"exchange": "gathered"}, "powersgd adds up and goes by all-reduces"),
        ("topk", {"exchange": "two_phase"}, "topk goes by the sparse all-reduce"),
        ("int8", {"flush_every": 5}, "int8 keeps nothing that drifts apart"),
        ("powersgd", {"flush_every": 5, "feedback": "off"}, "keeps nothing that drifts"),
        ("randomk:scaled=true", {"flush_every": 5}, "keeps nothing that drifts"),
        ("terngrad", {"feedback": "on"}, "what terngrad leaves out would grow"),
        ("dgc", {"optim": SGD, "feedback": "off"}, "what dgc keeps is its momentum"),
        ("dgc", {"optim": SGD, "start": 3}, "dgc warms up by itself"),
        ("signum", {"exchange": "gathered"}, "signum needs the owners of two_phase"),
        ("bf16", {"parallel": {"zero": 3}, "feedback": "on"}, "ZeRO-3 needs a codec that keeps no"),
        ("none", {"units": "update"}, "name a codec"),
        ("terngrad", {"units": "update"}, "terngrad keeps no residual here"),
        ("bf16", {"units": "update"}, "bf16 keeps no residual here"),
        ("int8", {"units": "update", "feedback": "off"}, "int8 keeps no residual here"),
        ("signum", {"units": "update"}, "signum keeps no residual here"),
    ],
)
def test_what_cannot_be(codec, more, why):
    with pytest.raises(msgspec.ValidationError, match=re.escape(why)):
        job(codec, **more)


def test_what_can():
    assert job("signum", sync={**LOCAL, "outer": "momentum:lr=0.01,momentum=0"})
    assert job("dgc:clip=1", optim=SGD, parallel={"zero": 1})
    for codec in ("bf16", "terngrad", "qsgd", "int8:rounding=stochastic", "rotate+terngrad"):
        assert job(codec, parallel={"zero": 2})
    assert job("int8", parallel={"zero": 3}, feedback="off")
    assert job("bf16", parallel={"node_shared": True})
    assert job("powersgd", flush_every=3, start=5, parallel={"zero": 1})
    assert job("bf16", units="update", feedback="on")
    assert job("powersgd", level="nodes", parallel={"pipe": 2})
    assert job("int8", level="nodes", sync=LOCAL)


@pytest.mark.parametrize(
    ("often", "every", "steps", "flushed"),
    [
        (3, 1, range(9), [2, 5, 8]),
        (100, 50, range(49, 300, 50), [99, 199, 299]),
        # Exchanges that never are after a multiple of as many steps.
        (50, 50, range(52, 300, 50), [52, 102, 152, 202, 252]),
        (70, 50, range(52, 300, 50), [102, 152, 252]),
        (7, 50, range(49, 200, 50), [49, 99, 149, 199]),
        (0, 1, range(5), []),
    ],
)
def test_ranks_average_what_was_left_out_in_the_first_sum_that_is_due(often, every, steps, flushed):
    how = compression(Compress("powersgd", flush_every=often), every)
    assert [step for step in steps if how.flushes(step)] == flushed


@pytest.mark.parametrize(("text", "keep"), [(".1", 0.1), ("1.", 1.0), ("+0.5", 0.5), ("1e-1", 0.1)])
def test_numbers_are_written_as_python_has_them(text, keep):
    assert parse(f"topk:keep={text}").keep == keep


@pytest.mark.parametrize("text", ["rotate+sign", "rotate+terngrad", "sign", "int4"])
def test_what_is_left_out_of_the_largest_numbers_stays_finite(text):
    code, draw = parse(text), np.random.default_rng(0)
    zeros = np.zeros(256, np.float32)
    memory = Residual(zeros)
    sent, packed = np.empty_like(zeros), np.zeros(code.nbytes(256), np.uint8)
    for _ in range(6):
        x = (draw.choice([-1.0, 1.0], 256) * draw.uniform(1e37, 3.39e38, 256)).astype(np.float32)
        memory.add_to(x)
        code.encode(x, packed, lambda: draw)
        code.decode(packed, sent)
        memory.keep(x, sent)
        memory.commit()
        assert np.isfinite(x).all() and np.isfinite(sent).all()
        assert all(np.isfinite(values).all() for values in memory.arrays.values())


def test_a_plan_of_more_ranks_than_can_be_proved_is_refused():
    with pytest.raises(ConfigError, match=r"plan -n 1000000: at most 65536 ranks"):
        explain(Config(), Machine(1_000_000, 8, 1.0))
