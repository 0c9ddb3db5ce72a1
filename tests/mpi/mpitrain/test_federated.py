"""Federated training on ranks: the same bits on any number of them, and its limits."""

from itertools import chain

import numpy as np
import pytest
from mpi4py import MPI
from msgspec.structs import replace

import mpitrain
from mpitrain.checkpoint.manifest import CheckpointError
from mpitrain.checkpoint.saving import resume
from mpitrain.config import Config, ConfigError, Data, Federated, Model, Optim, Run, Train
from mpitrain.data import Dataset, Samples
from mpitrain.federated.secure import RoundError
from mpitrain.metrics.reader import read_records
from mpitrain.metrics.records import Epoch, Round, Step
from mpitrain.optim.optimizers import LAMB, SGD, Adam
from mpitrain.ranks.stop import StopFlag, Stopped
from mpitrain.report import write_report
from mpitrain.run import train
from mpitrain.update.agreement import NonFinite
from tests.cases import mostly_slow, slow_case
from tests.mpi.mpitrain.layouts import RANKS, changed, in_folder

pytestmark = pytest.mark.at_most(5)


def job(dtype="float32", schedule="constant", **own):
    """A job of 20 clients by default; keys of [federated]."""
    if own.get("secure"):
        pytest.importorskip("cryptography")
    return Config(
        run=Run(seed=3, dtype=dtype, log_every=1000),
        data=Data(name="digits"),
        model=Model(kind="mlp", hidden=(12,)),
        optim=Optim(lr=0.1, reference_batch=0, momentum=0.5, schedule=schedule),
        train=Train(epochs=1, batch_size=16),
        federated=Federated(**{"clients": 20, "rounds": 3, **own}),
    )


def rounds(comm, config, count=None, **given):
    """The weights after some rounds, and the records of these."""
    with mpitrain.Trainer(comm, config, **given) as trainer:
        every = map(trainer.run_epoch, range(count or config.federated.rounds))
        records = [*chain.from_iterable(every)]
        trainer.parts.check_replicas("at the end")
        return trainer.parts.store.parameters.copy(), records


def alone(comm, config, count=None, **given):
    """The rounds on one rank, told to all."""
    found = None
    if comm.rank == 0:
        found = rounds(MPI.COMM_SELF, config, count, **given)
    return comm.bcast(found)


KINDS = {
    "all": {},
    "one": dict(sample=1, schedule="linear"),
    "sampled": dict(scheme="sampled", sample=12, split="dirichlet"),
    "late": dict(sample=12, take=9, spread=1.0, deadline=4.0, dropout=0.1, weigh="work",
                 bandwidth=5000.0),
    "prox, momentum": dict(prox=0.1, server_momentum=0.9, sample=8),
    "adam": dict(server="adam", server_lr=0.02, split="labels"),
    "lamb": dict(server="lamb", server_lr=0.02),
    "bits": dict(bits=5, sample=9),
    "rotated": dict(rotate=True, kept=0.3, bits=8),
    "clipped": dict(rotate=True, clip=0.01),
    "secure": dict(secure=True, sample=8, take=6, spread=0.5),
    "secure, rotated": dict(secure=True, rotate=True, bits=10, sample=8, take=6, dropout=0.2,
                            threshold=0.51),
}  # fmt: skip


@pytest.mark.parametrize("kind", mostly_slow(KINDS, ["one", "late", "lamb", "secure, rotated"]))
def test_the_weights_are_the_same_on_any_number_of_ranks(comm, kind):
    config = job(**KINDS[kind])
    found, records = rounds(comm, config)
    expected, told = alone(comm, config)
    np.testing.assert_array_equal(found, expected)

    def same(record):
        if isinstance(record, Step):
            return record.step, record.samples, record.loss, record.grad_norm, record.lr
        return replace(record, rank_bytes=0)

    assert [same(record) for record in records] == [same(record) for record in told]


def test_clients_of_the_program_that_repeat_a_split_give_its_bits(comm):
    """Texts, in the order of which the clients are numbered."""
    with mpitrain.Trainer(comm, job()) as trainer:
        samples = trainer.loop.clients
    whose = np.empty(sum(map(len, samples)), "U2")
    for client, own in enumerate(samples):
        whose[own] = chr(ord("a") + client)
    found, records = rounds(comm, job(split="own"), clients=lambda data: whose[: len(data)])
    expected, told = rounds(comm, job())
    np.testing.assert_array_equal(found, expected)
    assert [*records[0].losses] == [chr(ord("a") + client) for client in range(20)]
    assert [*records[0].losses.values()] == [*told[0].losses.values()]
    mean = np.average([*told[0].losses.values()], weights=[len(own) for own in samples])
    assert told[1].loss == pytest.approx(mean, rel=1e-6)
    assert "losses from" in str(told[0])


@pytest.mark.parametrize(
    ("clients", "own", "told"),
    [
        (None, dict(split="own"), "set both, or none"),
        ([0], dict(), "set both, or none"),
        ([0, 1], dict(split="own"), r"each of the 1437 training samples, .* of shape \(2,\)"),
        (lambda data: data[-1].none, dict(split="own"), "they cannot be read: AttributeError"),
        (lambda data: [7] * len(data), dict(split="own"), "names 1 clients, and the job says 20"),
        (lambda data: ["\ud800"] * len(data), dict(split="own"), "cannot be read: UnicodeEncode"),
        (lambda data: [1, "1", *[1] * (len(data) - 2)], dict(split="own"), "numbers or texts"),
    ],
)
def test_clients_that_cannot_be(comm, clients, own, told):
    with pytest.raises(ConfigError, match=told):
        mpitrain.Trainer(comm, job(**own), clients=clients)


@pytest.mark.parametrize("bad", [1, 40], ids=["one of two", "both"])
def test_a_client_that_skips_all_its_steps_has_no_loss(comm, folder, monkeypatch, bad):
    """Samples of client 0 are not finite, or those of both; the run writes checkpoints."""
    x = np.random.default_rng(1).normal(size=(40, 4))
    x[:bad] = np.nan
    data = Dataset(Samples(x, np.zeros((40, 1))), Samples(np.zeros((1, 4)), np.zeros((1, 1))), 0)
    monkeypatch.setattr("mpitrain.training.assemble.load", lambda *_: data)
    config = job("float64", clients=2, rounds=2, split="own", prox=0.1, prox_step=0.1)
    more = {"loss": {"name": "mean_squared_error"}, "checkpoint": {"every": 1}}
    config = in_folder(config, folder, on_nonfinite="skip", **more)
    with mpitrain.Trainer(comm, config, clients=[0] + [1] * 39) as trainer:
        trainer.fit()
    losses = [[*one.losses] for one in read_records(folder / "metrics.jsonl").of(Round)]
    assert losses == [["1"] if bad == 1 else []] * 2


def test_a_run_goes_on_with_the_clients_it_had(comm, folder):
    config = in_folder(job(clients=3, rounds=1, split="own"), folder)

    def fit(shift, resume=False):
        clients = lambda data: (np.arange(len(data)) + shift) % 3  # noqa: E731
        with mpitrain.Trainer(comm, config, clients=clients) as trainer:
            trainer.fit(resume=resume)

    fit(0)
    fit(0, resume=True)
    with pytest.raises(CheckpointError, match=r"own\.clients says has changed"):
        fit(1, resume=True)


@pytest.mark.parametrize("dtype", mostly_slow(["float32", "float64"], ["float32"]))
@pytest.mark.parametrize("optim", mostly_slow(["sgd", "adam", "lamb"], ["adam"]))
def test_one_client_is_training_without_clients(comm, dtype, optim):
    config = job(dtype, clients=1, rounds=1)
    config = replace(config, train=Train(epochs=2, batch_size=100))
    config = replace(config, optim=Optim(name=optim, lr=0.01, reference_batch=0, clip_norm=0.5))
    found, records = rounds(comm, config)
    expected, told = alone(comm, replace(config, federated=Federated()), 2)
    np.testing.assert_array_equal(found, expected)
    assert records[0].steps == len(told) == 2 * 15


@pytest.mark.parametrize("mu", mostly_slow([0.0, 0.3, 3.0], [0.3]))
def test_fedprox_ends_at_the_closed_form(comm, monkeypatch, mu):
    """min f(w) + mu/2 |w - x|^2 with gradient H w - b of f: w = (H + mu)^-1 (b + mu x)."""
    rng = np.random.default_rng(5)
    inputs = rng.normal(size=(40, 2))
    labels = inputs @ [[2.0], [-1.0]] + 0.7 + 0.1 * rng.normal(size=(40, 1))
    config = changed(job("float64", clients=1, prox=mu), epochs=400, batch_size=40, hidden=())
    optim = Optim(lr=0.2, reference_batch=0, momentum=0.0)
    config = replace(config, optim=optim, loss=replace(config.loss, name="mean_squared_error"))
    both = Samples(inputs, labels)
    monkeypatch.setattr("mpitrain.training.assemble.load", lambda *_: Dataset(both, both, 0))
    with mpitrain.Trainer(comm, config) as trainer:
        names = [tensor.name for tensor in trainer.parts.arena.tensors]
        assert [name.rpartition(".")[2] for name in names] == ["weight", "bias"]
        x = trainer.parts.store.parameters.copy()
        # The second derivative of the squared error by the output.
        scale = trainer.parts.model.loss(np.ones((1, 1)), np.zeros((1, 1)), 1)[1].item()
        list(trainer.run_epoch(0))
        found = trainer.parts.store.parameters.copy()
    wide = np.column_stack([inputs, np.ones(len(inputs))])
    hessian, b = scale * wide.T @ wide / len(wide), scale * wide.T @ labels[:, 0] / len(wide)
    expected = np.linalg.solve(hessian + mu * np.eye(3), b + mu * x)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("own", "rule", "rate"),
    [
        slow_case(*(dict(server_momentum=0.9, server_lr=0.7), SGD(0.9), 0.7)),
        slow_case(*(dict(server="adam", server_lr=0.1), Adam(0.9, 0.99, 1e-3), 0.1)),
        (dict(server="lamb", server_lr=0.1), LAMB(0.9, 0.99, 1e-3), 0.1),
        (dict(split="dirichlet", sample=6), SGD(0.0), 1.0),
    ],
)
@pytest.mark.quick_on(2)
def test_the_servers_optimiser_takes_the_mean_change(comm, own, rule, rate):
    """Each round's change, from a run of one round each, put through the optimiser by hand."""
    config = job("float64", **own)
    with mpitrain.Trainer(comm, config) as trainer:
        x, improve = trainer.parts.store.parameters.copy(), trainer.loop._client.improve
        state = {slot: np.zeros_like(x) for slot in rule.slots}
        for number in range(3):
            cohort = trainer.loop.choice.cohort(number)
            changes = [
                x - improve(x, number, p.client, trainer.loop.clients[p.client], p.steps).weights
                for p in cohort.parts
            ]
            change = np.average(changes, axis=0, weights=[p.weight for p in cohort.parts])
            direction = rule.prepare(x, change, state, number + 1)
            factor = np.ones_like(x)
            if rule.layerwise:
                for t in trainer.parts.arena.tensors:
                    part = slice(t.start, t.stop)
                    three = (np.linalg.norm(a[part]) for a in (x, change, direction))
                    factor[part] = rule.ratio(*three)
            rule.apply(x, direction, state, rate * factor)
            list(trainer.run_epoch(number))
            np.testing.assert_allclose(trainer.parts.store.parameters, x, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "own",
    [
        dict(bits=12),
        dict(bits=10, rotate=True, kept=0.4),
        dict(bits=12, sample=9, take=7, spread=1.0, dropout=0.05),
        dict(bits=8, scheme="sampled", sample=12),
    ],
)
@pytest.mark.quick_on(3)
def test_the_secure_sum_is_that_of_the_codes(comm, own):
    own = {"clients": 10, **own}
    found, records = rounds(comm, job(**own, secure=True, threshold=0.51), 2)
    np.testing.assert_array_equal(found, rounds(comm, job(**own), 2)[0])
    assert any(r.dropped for r in records if isinstance(r, Round)) == ("take" in own)


#: The server's weights overflow also in the last round, whose weights no client would meet.
OVERFLOWS = dict(server_lr=1e39, rounds=1)
SERVERS = {"sgd": {}, "adam": {"server_epsilon": 1e-30}, "lamb": {"server_epsilon": 1e-30}}


@pytest.mark.parametrize(
    ("own", "lr", "error", "told"),
    [
        (dict(clients=10, secure=True, dropout=0.7), 0.1, RoundError,
         r"secure sum of 10 clients has \d left, and 7 must be"),
        (dict(deadline=0.1), 0.1, RoundError, "round 1: none of 20 clients has sent anything"),
        ({}, 1e30, NonFinite, r"client \d+ in round 1: the loss or a gradient"),
        *(pytest.param(dict(server=server, **OVERFLOWS, **more), 30.0, NonFinite,
                       "round 1: the server's weights are not finite",
                       marks=pytest.mark.quick_on(3)) for server, more in SERVERS.items()),
    ],
)  # fmt: skip
def test_a_round_without_a_result_is_an_error_of_all_ranks(comm, own, lr, error, told):
    config = replace(job(**own), optim=Optim(lr=lr, reference_batch=0))
    with mpitrain.Trainer(comm, config) as trainer:
        before = trainer.parts.store.parameters.copy()
        # The server's step overflows without a warning; a client's may warn.
        seen = {"all": "raise", "under": "ignore"} if "server_lr" in own else {}
        with np.errstate(**seen), pytest.raises(error, match=told):
            list(trainer.run_epoch(0))
        if error is RoundError:
            np.testing.assert_array_equal(trainer.parts.store.parameters, before)


@pytest.mark.quick_on(2)
def test_bytes_are_those_of_the_messages(comm):
    elements = 64 * 12 + 12 + 12 * 10 + 10
    share = 2 * (RANKS - 1) / RANKS

    def first(**own):
        return rounds(comm, job(clients=10, **own), 1)[1][0]

    dense = first()
    assert (dense.client_bytes, dense.plain_bytes) == (4 * elements, 4 * elements)
    assert dense.rank_bytes == pytest.approx(share * 16 * elements, rel=0.01)
    coded = first(bits=5, rotate=True, kept=0.25)  # 1437 samples times 31 are less than 2**16
    assert coded.client_bytes == 256 * 5 // 8 + 8
    assert coded.rank_bytes == pytest.approx(share * 2 * 257, rel=0.02)
    assert first(bits=6).rank_bytes == pytest.approx(share * 4 * (elements + 1), rel=0.02)
    secure = first(bits=5, secure=True)
    keys, sealed, shown = 64, 2 * 33 + 16, 10 * 33
    assert secure.client_bytes == 4 * (elements + 1) + keys + 9 * sealed + shown
    # Bytes of rank 0: sums of codes and of masks, its clients' keys, and what they tell of shares.
    own, telling = len(range(0, 10, RANKS)), len(range(0, 7, RANKS))
    beside = own * (10 - own) * sealed + (own * keys + telling * shown) * (RANKS - 1)
    assert secure.rank_bytes == pytest.approx(share * 8 * (elements + 1) + beside, rel=0.02)


@pytest.mark.quick_on(3)
@pytest.mark.parametrize(
    "own",
    [
        slow_case(dict(server_momentum=0.9, sample=8)),
        dict(server="adam", server_lr=0.02, scheme="sampled", sample=8, rotate=True, bits=6,
             prox_step=0.3),
    ],
)  # fmt: skip
def test_a_run_that_was_stopped_goes_on_bit_by_bit(comm, folder, own):
    config = changed(job(rounds=6, schedule="cosine", **own), average=0.5, checkpoint={"every": 2})
    config = in_folder(config, folder)
    stop = StopFlag()

    def before_round(parts):
        if parts.steps_done == 3 and comm.rank == RANKS - 1:
            stop.reason = "a test"

    with (
        mpitrain.Trainer(comm, config, stop=stop, before_step=before_round) as trainer,
        pytest.raises(Stopped, match=r"stopped after step 4 of 6 \(a test\)"),
    ):
        train(trainer)
    with mpitrain.Trainer(comm, config) as trainer:
        train(trainer, go_on=True)
        found = trainer.parts.store.parameters.copy()
        average = [state["average"].copy() for state in trainer.parts.updater.state]
    with mpitrain.Trainer(comm, config) as trainer:
        for number in range(6):
            list(trainer.run_epoch(number))
        np.testing.assert_array_equal(found, trainer.parts.store.parameters)
        for one, state in zip(average, trainer.parts.updater.state, strict=True):
            np.testing.assert_array_equal(one, state["average"])
    # Another number of ranks goes on from the same checkpoint.
    other = MPI.COMM_WORLD.Split(comm.rank % 2, comm.rank)
    with mpitrain.Trainer(other, config) as trainer:
        assert resume(trainer.parts).step == 6
        np.testing.assert_array_equal(found, trainer.parts.store.parameters)
    comm.barrier()
    other.Free()
    if comm.rank == 0:
        log = read_records(folder / "metrics.jsonl")
        for kind in (Step, Round):
            assert [record.step for record in log.of(kind)] == [1, 2, 3, 4, 5, 6]
        # The test of the round after which it was stopped is made when it goes on.
        assert [test.epoch for test in log.of(Epoch)] == [0, 1, 2, 3, 4, 5]
        assert log.summary() and log.summary().ended == "all 6 steps are done"
        pytest.importorskip("matplotlib")
        assert write_report(folder).stat().st_size > 1000


@pytest.mark.quick_on(2)
def test_a_torch_module_is_trained_as_layers_are(comm, split_off):
    torch = pytest.importorskip("torch")

    def module(middle=torch.nn.ReLU):
        first = torch.nn.Flatten(), torch.nn.Linear(64, 8)
        return torch.nn.Sequential(*first, middle(), torch.nn.Linear(8, 10))

    config = job(clients=6)
    found, _ = rounds(comm, config, model=module)
    expected, _ = alone(comm, config, model=module)
    np.testing.assert_array_equal(found, expected)
    with pytest.raises(ConfigError, match=r"batch norm needs forward passes .* take group or"):
        mpitrain.Trainer(comm, config, model=lambda: module(lambda: torch.nn.BatchNorm1d(8)))
    assert not split_off
