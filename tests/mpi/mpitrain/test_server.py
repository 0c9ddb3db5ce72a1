"""Parameter servers: as synchronous training where nothing is late, and in the order served."""

import random
import time

import numpy as np
import pytest
from mpi4py import MPI
from msgspec.structs import replace

from collectives.codec import Dice
from mpitrain.compress import parse
from mpitrain.config import Config, Parallel, Server
from mpitrain.data import DataError
from mpitrain.data.sampler import Sampler
from mpitrain.group import share
from mpitrain.pipeline.stage import Stage
from mpitrain.run import train
from mpitrain.server.messages import MessageKind
from mpitrain.server.server import Serving
from mpitrain.server.worker import Worker
from mpitrain.start import start
from mpitrain.update.agreement import NonFinite
from tests.cases import mostly_slow, slow_case
from tests.mpi.mpitrain.layouts import RANKS, changed, equal, to_the_end, whole

pytestmark = [
    pytest.mark.at_most(5),
    pytest.mark.skipif(RANKS < 2, reason="a server needs a worker"),
]
quick, slow = pytest.mark.quick_on(4), pytest.mark.slow
STEPS = 12
OPTIMS = {
    "sgd": dict(lr=0.05, momentum=0.8, weight_decay=1e-3, nesterov=True),
    "adam": dict(name="adam", lr=1e-3, weight_decay=1e-3),
    "adamw": dict(name="adamw", lr=1e-3, weight_decay=0.1, warmup_epochs=0.5, schedule="cosine"),
}


def job(folder, optim=None, every=0, **server):
    return changed(
        Config(), seed=4, dir=folder, server=server,
        data={"name": "digits"}, model={"kind": "mlp", "hidden": [12]},
        optim=optim or {"lr": 0.05, "momentum": 0.8, "weight_decay": 1e-3},
        train={"epochs": 3, "steps": STEPS, "batch_size": 96, "micro_batches": 2},
        checkpoint={"every": every, "keep": 9},
    )  # fmt: skip


def without(config, **parallel):
    return replace(config, server=Server(), parallel=Parallel(**parallel))


def trained(comm, config, **given):
    """The parameters after the job's steps, and the records of these."""
    with start(comm, config, **given) as trainer:
        records = to_the_end(trainer)
        trainer.parts.comm.Barrier()
        return whole(comm, trainer), records


def synchronous(comm, config, workers, **parallel):
    """Results of the first ranks alone, without servers; on all ranks."""
    part = comm.Split(comm.rank < workers, comm.rank)
    found = None
    if comm.rank < workers:
        found = trained(part, without(config, **parallel))
    part.Free()
    return comm.bcast(found)


def delays(comm, seed):
    """Before each step of each rank, a drawn one, so that messages come in another order."""
    rng = random.Random(f"{seed} {comm.rank}")
    return lambda parts: time.sleep(rng.choice([0.0, 0.0, 0.002, 0.01]))


#: Numbers of servers.
SERVERS = [count for count in (1, 2) if count < RANKS]
ONE_IS_SLOW = [pytest.param(count, marks=quick if count == 2 else slow) for count in SERVERS]


@pytest.mark.parametrize("servers", ONE_IS_SLOW)
@pytest.mark.parametrize("optim", mostly_slow(OPTIMS, ["sgd"]))
def test_without_lag_it_is_the_all_reduce_bit_by_bit(comm, folder, servers, optim):
    """Parameter servers' all-reduce, which sums in the order of the ranks, and then one step."""
    config = job(folder, OPTIMS[optim], ranks=servers, bound=0, window=5)
    found, records = trained(comm, config, before_step=delays(comm, 1))
    expected, theirs = synchronous(comm, config, RANKS - servers, algorithm="parameter_server")
    equal(found, expected)
    for own, other in zip(records, theirs, strict=True):
        assert (own.step, own.samples, own.lr) == (other.step, other.samples, other.lr)
        assert own.loss == pytest.approx(other.loss, rel=1e-6)
        assert own.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
        assert (own.served.lag_max, own.served.behind_max) == (0, 0)


@slow
@pytest.mark.parametrize("bound", [0, 2, "none"])
@pytest.mark.parametrize("optim", OPTIMS)
def test_one_worker_is_one_process_bit_by_bit(comm, folder, bound, optim):
    config = job(folder, OPTIMS[optim], ranks=RANKS - 1, bound=bound, window=5)
    found, _ = trained(comm, config)
    expected, _ = synchronous(comm, config, 1)
    equal(found, expected)


ASYNCHRONOUS = {
    "bound 1": dict(bound=1),
    "no bound": dict(bound="none"),
    "predict": dict(bound=2, correct="predict"),
    "fetch 3, push 2": dict(bound="none", fetch=3, push=2),
    "push 4": dict(bound="none", push=4),
    "groups": dict(bound=1, groups=max(1, (RANKS - 1) // 2)),
}


@pytest.mark.parametrize("servers", ONE_IS_SLOW)
@pytest.mark.parametrize("kind", mostly_slow(ASYNCHRONOUS, ("predict", "groups")))
def test_no_gradient_is_of_older_parameters_than_the_bound_allows(comm, folder, servers, kind):
    own = dict(ranks=servers, **ASYNCHRONOUS[kind])
    if own.get("groups", 0) > RANKS - servers:
        pytest.skip("more groups than workers")
    config = job(folder, every=4, **own)
    _, records = trained(comm, config, before_step=delays(comm, 3))
    workers, server = own.get("groups") or RANKS - servers, config.server
    assert sum(one.served.pushes for one in records) >= workers
    if server.limit is None:
        return
    assert all(one.served.pushes == workers for one in records)
    assert max(one.served.behind_max for one in records) <= server.limit
    most = (workers - 1) * (2 * server.limit + 1)
    assert max(one.served.lag_max for one in records) <= most


def simulated(logs, config, workers):
    """The weights by the order of service, in one process, with an optimiser written out here."""
    servers = len(logs)
    with start(MPI.COMM_SELF, without(config)) as trainer:
        model, arena, data = trainer.parts.model, trainer.parts.arena, trainer.parts.data
        weights = trainer.parts.store.parameters.copy()
    velocity = np.zeros_like(weights)
    stage = Stage(list(model.layers.values()), 0, list(model.layers))
    sampler = Sampler(len(data.train), config.train.batch_size, config.run.seed)
    batches = [b for epoch in range(3) for b in sampler.batches(epoch)][:STEPS]
    parts = workers * config.train.micro_batches
    decay = np.float32(config.optim.weight_decay / workers)

    def gradient(worker, clock, at):
        views, total = arena.views(at), np.zeros_like(at)
        totals = arena.views(total)

        class Fixed:
            take = staticmethod(lambda layer, following: views[layer])
            release = staticmethod(lambda layer: None)

        def emit(layer, found):
            for key, value in found.items():
                totals[layer][key] += value

        for part in range(worker, parts, workers):
            batch = batches[clock]
            samples = data.train[batch[share(len(batch), part, parts)]]
            y, saved = stage.forward(Fixed, samples.inputs)
            _, dy = model.loss(y, samples.labels, len(batch))
            stage.backward(Fixed, saved, dy, emit)
        return total

    def pushed(worker, clock, part, shard):
        """As the server sees it."""
        if codec is None:
            return part
        code, decoded = np.empty(codec.nbytes(part.size), np.uint8), np.empty_like(part)
        dice = Dice(config.run.seed, worker, clock)
        codec.encode(part, code, lambda: dice.draw(shard.start, 0))
        codec.decode(code, decoded)
        return decoded

    codec = None if config.compress.codec == "none" else parse(config.compress.codec)

    sent, at = {}, [0] * servers
    shards = [share(weights.size, server, servers) for server in range(servers)]
    while any(position < len(log) for position, log in zip(at, logs, strict=True)):
        before = list(at)
        for server, shard in enumerate(shards):
            if at[server] == len(logs[server]):
                continue
            kind, *key = logs[server][at[server]]
            if kind is MessageKind.PULL:
                sent[server, *key] = weights[shard].copy()
            else:
                pulled = [sent.get((other, *key)) for other in range(servers)]
                if any(part is None for part in pulled):
                    continue
                g = gradient(*key, np.concatenate(pulled))[shard]
                g = pushed(*key, g, shard) + decay * weights[shard]
                velocity[shard] = np.float32(config.optim.momentum) * velocity[shard] + g
                weights[shard] -= np.float32(0.05 * 96 / 64) * velocity[shard]
            at[server] += 1
        assert at != before, "the servers contradict each other"
    return {t.name: weights[t.start : t.stop].reshape(t.shape) for t in arena.tensors}


@pytest.fixture
def served(comm, monkeypatch):
    """Gives the kind, worker and clock of all messages in turn, server by server; collective."""
    own, serve = [], Serving._serve

    def noted(side, worker):
        kind, clock, _ = side._clients.inbox[worker].header()
        own.append((kind, worker, clock))
        return serve(side, worker)

    monkeypatch.setattr(Serving, "_serve", noted)
    return lambda: [*filter(None, comm.allgather(own))]


@pytest.mark.parametrize("servers", ONE_IS_SLOW)
@pytest.mark.parametrize("codec", ["none", slow_case("qsgd")])
def test_one_process_in_the_order_of_service_has_the_same_bits(
    comm, folder, served, servers, codec
):
    """Pushes by codes with the dice of the worker and its clock."""
    config = changed(job(folder, ranks=servers, bound="none", window=5), codec=codec)
    found, _ = trained(comm, config, before_step=delays(comm, 5))
    logs = served()
    if comm.rank == 0:
        equal(found, simulated(logs, config, RANKS - servers))


@pytest.mark.skipif(RANKS < 3, reason="one worker is late, and another is not")
def test_a_quorum_leaves_a_slow_worker_behind(comm, folder, served):
    """Nobody waits for it but at the meeting, and it skips the batches that are over."""
    workers = RANKS - 1
    config = job(folder, ranks=1, bound=0, quorum=(workers - 1) / workers, window=STEPS)

    def slow(parts):
        time.sleep(0.2 * (comm.rank == 0))

    with start(comm, config, before_step=slow) as trainer:
        records = to_the_end(trainer)
        trainer.parts.check_replicas("at the end")
    (log,) = served()
    assert [one.step for one in records] == [*range(1, STEPS + 1)]
    assert {one.served.pushes for one in records} == {workers - 1}
    assert all(np.isfinite(one.loss) and one.served.lag_max == 0 for one in records)
    pushed = [worker for kind, worker, _ in log if kind is MessageKind.PUSH]
    assert pushed.count(0) < STEPS
    assert all(pushed.count(worker) == STEPS for worker in range(2, workers))


@pytest.mark.parametrize(
    "codec",
    [pytest.param("none", marks=quick), *(slow_case(c) for c in ("bf16", "int8", "terngrad"))],
)
def test_bytes_are_those_of_the_messages(comm, folder, codec):
    """64 bytes of header each: a push and a request a server, and parameters; one end a window."""
    servers, workers = SERVERS[-1], RANKS - SERVERS[-1]
    config = job(folder, ranks=servers, bound=1, window=3)
    if codec != "none":
        config = changed(config, codec=codec, feedback="off")
    found, records = trained(comm, config)
    size = pushed = 4 * sum(values.size for values in found.values())
    if codec != "none":
        parts = [share(size // 4, number, servers) for number in range(servers)]
        pushed = sum(parse(codec).nbytes(part.stop - part.start) for part in parts)
    for record in records:
        ends = workers * servers * 64 * (record.step % 3 == 0)
        assert record.served.pulled_bytes == workers * (size + 64 * servers)
        assert record.served.pushed_bytes == workers * (pushed + 128 * servers) + ends


@pytest.mark.parametrize("own", [dict(push=1), dict(push=3, bound="none")], ids=str)
def test_an_average_keeps_as_much_in_a_step_as_without_servers(comm, folder, own):
    config = job(folder, {"average": 0.9}, ranks=1, **own)
    with start(comm, config) as trainer:
        pushes = (RANKS - 1) / config.server.push
        assert trainer.parts.updater.decay**pushes == pytest.approx(0.9)


def test_a_workers_own_steps_leave_a_frozen_group_alone(comm, folder, monkeypatch):
    seen, theirs = set(), Worker._push

    def noted(self, clock, first, stop):
        arena, flat = self._parts.arena, self._parameters
        for tensor in arena.tensors if flat.size else ():
            seen.add((tensor.name, flat[tensor.start : tensor.stop].tobytes()))
        theirs(self, clock, first, stop)

    monkeypatch.setattr(Worker, "_push", noted)
    optim = {"lr": 0.05, "groups": [{"names": ["*.bias"], "lr": 0.0}]}
    trained(comm, job(folder, optim, ranks=1, bound="none", fetch=4))
    names = [name for name, _ in seen]
    assert all((names.count(name) == 1) == name.endswith("bias") for name in names)


@slow
def test_an_asynchronous_run_goes_on_with_other_servers(comm, folder):
    half = job(folder / "halves", every=4, ranks=SERVERS[-1], bound=2, optim=OPTIMS["adam"])
    for seed, config in ((8, changed(half, steps=8)), (9, half)):
        with start(comm, config, before_step=delays(comm, seed)) as trainer:
            train(trainer, go_on=seed == 9)
    # The checkpoint is everybody's: without servers, and with one more or less of them.
    for last, other in ((13, Server()), (14, Server(ranks=RANKS - 1))):
        with start(comm, changed(replace(half, server=other), steps=last)) as trainer:
            train(trainer, go_on=True)
            assert trainer.parts.steps_done == last


@pytest.mark.parametrize("servers", ONE_IS_SLOW)
@pytest.mark.parametrize("bound", [0, slow_case(1), "none"])
def test_an_error_of_one_worker_is_one_of_all_ranks(comm, folder, servers, bound):
    def fail(parts):
        if comm.rank == 0 and parts.steps_done == 3:
            raise DataError("bad sector")

    config, told = job(folder, ranks=servers, bound=bound), rf"bad sector \(rank 0 of {RANKS}, on "
    with start(comm, config, before_step=fail) as trainer, pytest.raises(DataError, match=told):
        list(trainer.run_epoch(0))


@quick
def test_a_workers_sample_that_is_not_finite_is_named_on_all_ranks(comm, folder):
    with start(comm, job(folder, ranks=1, bound=1)) as trainer:
        trainer.parts.data.train.inputs[5] = np.nan
        with pytest.raises(NonFinite, match="the inputs of sample 5 to train on hold nan"):
            list(trainer.run_epoch(0))
