"""Values that [compress] takes."""

import re

import msgspec
import numpy as np
import pytest

from collectives.codec import Residual
from mpitrain.compress import parse
from mpitrain.config import Config

SGD = {"name": "sgd", "momentum": 0.0}


def job(codec, sync=None, optim=None, parallel=None, **how):
    tables = {"sync": sync or {}, "optim": optim or {}, "parallel": parallel or {}}
    return msgspec.convert({"compress": {"codec": codec, **how}, **tables}, Config)


@pytest.mark.parametrize(
    ("codec", "more", "why"),
    [
        ("nosuch", {}, "there is no codec 'nosuch'"),
        ("auto", {}, "there is no codec 'auto'"),
        ("terngrad", {"feedback": "on"}, "what terngrad leaves out would grow"),
        ("dgc", {"optim": SGD, "feedback": "off"}, "what dgc keeps is its momentum"),
        ("dgc", {"optim": SGD, "start": 3}, "dgc warms up by itself"),
        ("bf16", {"parallel": {"zero": 3}, "feedback": "on"}, "ZeRO-3 needs a codec that keeps no"),
    ],
)
def test_what_cannot_be(codec, more, why):
    with pytest.raises(msgspec.ValidationError, match=re.escape(why)):
        job(codec, **more)


@pytest.mark.parametrize("text", ["sign", "terngrad", "int8"])
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
