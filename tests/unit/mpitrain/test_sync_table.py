"""What [sync] may say."""

import re

import msgspec
import pytest

from mpitrain.config import Config, Sync
from mpitrain.config.sync import Outer, parse_outer

LOCAL, DELAYED, QUORUM = ({"kind": kind} for kind in ("local", "delayed", "quorum"))


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
        job({**LOCAL, "outer": text})


@pytest.mark.parametrize(
    ("sync", "tables", "why"),
    [
        ({"period": 5}, {}, "sync.period: every_step does not read it, local and delayed do"),
        ({**DELAYED, "fragments": 2}, {}, "sync.fragments: delayed does not read it, local does"),
        ({**LOCAL, "quorum": 0.5}, {}, "sync.quorum: local does not read it, quorum does"),
        ({**LOCAL, "period": 4, "delay": 4}, {}, "delay = 4 must be less than period = 4"),
        ({**LOCAL, "period": 4, "fragments": 5}, {}, "5 fragments need as many steps"),
        ({**LOCAL, "delay": 1, "state": "averaged"}, {}, "set delay = 0, or state = 'own'"),
        ({**LOCAL, "fragments": 2, "state": "averaged"}, {}, "set fragments = 1"),
        (LOCAL, {"parallel": {"zero": 1}}, "local has whole workers"),
        (QUORUM, {"parallel": {"algorithm": "ring"}}, "parallel.algorithm: quorum sums as"),
        ({**DELAYED, "combine": "adasum"}, {}, "sync.combine: delayed does not read it"),
        ({"combine": "adasum"}, {"compress": {"codec": "int8"}}, "codes are of sums"),
        ({"combine": "adasum"}, {"parallel": {"zero": 2}}, "set zero = 0 or 1"),
        (
            {"combine": "adasum"},
            {"parallel": {"tensor": 2}, "model": {"kind": "mlp"}},
            "tensor = 1",
        ),
        ({"combine": "adasum"}, {"server": {"ranks": 1}}, "servers take each push"),
        (DELAYED, {"parallel": {"node_shared": True}}, "delayed has whole workers"),
        (LOCAL, {"parallel": {"replicas": [2, 1]}}, "a worker of local is a replica of all stages"),
        (
            LOCAL,
            {"parallel": {"schedule": "asynchronous"}, "optim": {"name": "sgd"}},
            "an asynchronous pipeline has updates of its own, and local has others",
        ),
        (
            DELAYED,
            {"model": {"kind": "recommender"}, "data": {"name": "clicks"}},
            "the recommender's tables are spread over the workers",
        ),
        ({**LOCAL, "agree": 2}, {"run": {"on_nonfinite": "skip"}}, "sync.agree: to skip a step"),
        ({**LOCAL, "agree": 2}, {"run": {"compute": "float16"}}, "sync.agree: to skip a step"),
        (
            {**LOCAL, "agree": 4},
            {"checkpoint": {"every": 6}},
            "checkpoint.every = 6 must be a multiple of 4",
        ),
        (
            {**DELAYED, "period": 2, "delay": 3},
            {"compress": {"codec": "bf16"}},
            "delay = 3 may be at most period = 2",
        ),
        (LOCAL, {"compress": {"codec": "auto"}}, "auto times the sum of gradients of every step"),
        (
            LOCAL,
            {"server": {"ranks": 1}},
            "servers say when their workers talk, and local does",
        ),
        (QUORUM, {"parallel": {"pipe": 2}}, "quorum leaves out workers of one rank"),
        (QUORUM, {"compress": {"codec": "bf16"}}, "quorum gathers gradients at one rank"),
        (QUORUM, {"run": {"compute": "float16"}}, "quorum takes gradients of several steps"),
        (QUORUM, {"parallel": {"checksums": True}}, "messages of quorum carry none"),
    ],
)
def test_what_does_not_go_together(sync, tables, why):
    with pytest.raises(msgspec.ValidationError, match=re.escape(why)):
        job(sync, **tables)


def test_what_does():
    job({**LOCAL, "period": 8, "fragments": 4, "delay": 7, "outer": "nesterov", "agree": 8})
    job({**DELAYED, "period": 2, "delay": 9}, parallel={"pipe": 2, "tensor": 1})
    job({**DELAYED, "period": 2, "delay": 2}, compress={"codec": "bf16"})
    job(QUORUM, optim={"name": "lamb", "average": 0.9})


@pytest.mark.parametrize(
    ("quorum", "workers", "needed"),
    [(0.95, 20, 19), (0.95, 40, 38), (0.95, 2, 2), (0.5, 3, 2), (0.01, 4, 1), (1.0, 7, 7)],
)
def test_a_quorum_is_rounded_up(quorum, workers, needed):
    assert Sync(kind="quorum", quorum=quorum).needed(workers) == needed
