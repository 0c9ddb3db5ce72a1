"""What a job with clients may say."""

import pytest

from mpitrain.config import ConfigError, load
from mpitrain.metrics.records import Round


@pytest.fixture
def job(tmp_path):
    def write(*overrides):
        path = tmp_path / "job.toml"
        path.write_text("[federated]\nclients = 10\n[model]\nkind = 'mlp'\n")
        return load(path, overrides)

    return write


def test_all_are_asked_and_taken_if_nothing_is_said(job):
    own = job().federated
    assert (own.asked, own.taken, own.is_coded) == (10, 10, False)
    own = job("federated.sample=6", "federated.take=5", "federated.bits=8").federated
    assert (own.asked, own.taken, own.is_coded) == (6, 5, True)
    assert [own.least(n) for n in (3, 6, 7, 300)] == [2, 4, 5, 200]


def test_schedules_count_rounds(job):
    asked = ["federated.rounds=50", "train.epochs=1", "optim.warmup_epochs=5"]
    assert job(*asked, "optim.schedule=wsd", "optim.decay_epochs=45").passes == 50
    with pytest.raises(ConfigError, match="warmup_epochs: 50 must be less than federated"):
        job(*asked, "optim.warmup_epochs=50")
    with pytest.raises(ConfigError, match="at most 45 epochs"):
        job(*asked, "optim.schedule=wsd", "optim.decay_epochs=46")


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ("sample=11", "federated.sample: there are 10 clients, and 11 are asked"),
        ("take=11", "federated.take: 10 clients are asked, and 11 are to be taken"),
        ("clip=1.0", "federated.clip: cuts numbers on a grid; set bits"),
        ("kept=0.0", "federated.kept: expected a number > 0.0"),
        ("bits=25", "federated.bits: expected a whole number <= 24"),
        ("alpha=1e10", "federated.alpha: expected a number <= 1000000000.0"),
        ("spread=101.0", "federated.spread: expected a number <= 100.0"),
        ("server=sdg", "federated.server = 'sdg': unknown value; did you mean 'sgd'?"),
        ("cleints=3", "federated.cleints: unknown key; did you mean 'clients'?"),
        ("train.steps=5", "train.steps: a client takes the steps of its epochs"),
        ("secure=true clients=2", "federated.secure: each of 2 clients knows from the sum what th"),
        ("secure=true clients=9 take=5", "federated.threshold: 6 of the 9 clients that are asked"),
        ("secure=true clients=9 sample=6 take=2", "federated.secure: each of 2 clients knows"),
    ],
)
def test_what_clients_cannot_have(job, own, message):
    with pytest.raises(ConfigError) as caught:
        job(*(one if one[:6] == "train." else f"federated.{one}" for one in own.split()))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_round_is_said_in_words():
    assert str(Round(3, 300, 256, 44, 7, 900, 1.5, 100, 400, 50)) == (
        "round 3: 256 of 300 clients, 7 of them cut off; each sent at most 100 bytes of a "
        "change of 400"
    )
