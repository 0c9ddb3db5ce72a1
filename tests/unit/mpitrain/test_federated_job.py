"""What a job with clients may say, and commands that are of jobs without."""

from pathlib import Path

import pytest

from mpitrain.config import ConfigError, load
from mpitrain.metrics.reader import read_records
from mpitrain.metrics.records import Round


@pytest.fixture
def job(tmp_path):
    def write(text, *overrides):
        path = tmp_path / "job.toml"
        path.write_text(text)
        return load(path, overrides)

    return write


CLIENTS = "[federated]\nclients = 10\n"


def test_all_are_asked_and_taken_if_nothing_is_said(job):
    own = job(CLIENTS).federated
    assert (own.asked, own.taken, own.is_coded) == (10, 10, False)
    own = job(CLIENTS + "sample = 6\ntake = 5\nbits = 8\n").federated
    assert (own.asked, own.taken, own.is_coded) == (6, 5, True)
    assert [own.least(n) for n in (3, 6, 7, 300)] == [2, 4, 5, 200]


def test_schedules_count_rounds(job):
    text = CLIENTS + "rounds = 50\n[train]\nepochs = 1\n[optim]\nwarmup_epochs = 5\n"
    assert job(text + "schedule = 'wsd'\ndecay_epochs = 45\n").passes == 50
    with pytest.raises(ConfigError, match="warmup_epochs: 50 must be less than federated"):
        job(text, "optim.warmup_epochs=50")
    with pytest.raises(ConfigError, match="at most 45 epochs"):
        job(text, "optim.schedule=wsd", "optim.decay_epochs=46")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("federated.sample=11", "federated.sample: there are 10 clients, and 11 are asked"),
        ("federated.take=11", "federated.take: 10 clients are asked, and 11 are to be taken"),
        ("federated.clip=1.0", "federated.clip: cuts numbers on a grid; set bits"),
        ("federated.kept=0.0", "federated.kept: expected a number > 0.0"),
        ("federated.bits=25", "federated.bits: expected a whole number <= 24"),
        ("federated.alpha=1e10", "federated.alpha: expected a number <= 1000000000.0"),
        ("federated.spread=101.0", "federated.spread: expected a number <= 100.0"),
        ("federated.server=sdg", "federated.server = 'sdg': unknown value; did you mean 'sgd'?"),
        ("federated.cleints=3", "federated.cleints: unknown key; did you mean 'clients'?"),
        ("train.steps=5", "train.steps: a client takes the steps of its epochs"),
    ],
)
def test_what_clients_cannot_have(job, override, message):
    text = CLIENTS + "[model]\nkind = 'mlp'\n"
    with pytest.raises(ConfigError) as caught:
        job(text, override)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ("clients = 2", "federated.secure: each of 2 clients knows from the sum what the other"),
        ("clients = 9\ntake = 5", "federated.threshold: 6 of the 9 clients that are asked must"),
        ("clients = 9\nsample = 6\ntake = 2", "federated.secure: each of 2 clients knows"),
    ],
)
def test_secure_sums_that_would_hide_nothing(job, own, message):
    with pytest.raises(ConfigError) as caught:
        job(f"[federated]\nsecure = true\n{own}\n")
    assert str(caught.value).startswith(message)


def test_rounds_are_read_again_and_said_in_words(tmp_path):
    line = (
        b'{"event":"round","step":3,"asked":300,"taken":256,"dropped":44,"partial":7,"steps":900,'
        b'"clock":1.5,"client_bytes":100,"plain_bytes":400,"rank_bytes":50,"clipped":0.0}\n'
    )
    path = Path(tmp_path / "metrics.jsonl")
    path.write_bytes(line)
    (found,) = read_records(path).of(Round)
    assert str(found) == (
        "round 3: 256 of 300 clients, 7 of them cut off; each sent at most 100 bytes of a "
        "change of 400"
    )
