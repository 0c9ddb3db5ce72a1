"""Workers that train by themselves, in the trainer: against processes that know of no others."""

from itertools import islice

import numpy as np
import pytest
from mpi4py import MPI
from msgspec.structs import replace

from mpitrain.checkpoint.reader import CheckpointReader
from mpitrain.checkpoint.saving import checkpoints, resume, save
from mpitrain.checkpoint.writer import Writer
from mpitrain.config import Compress, Optim, Sync
from mpitrain.group import share
from mpitrain.metrics.reader import read_records
from mpitrain.metrics.records import Skipped, Step
from mpitrain.pipeline.stage import Latest
from mpitrain.ranks.stop import Stopped
from mpitrain.run import train
from mpitrain.start import start
from mpitrain.sync.loop import DriftingLoop
from mpitrain.training.evaluation import evaluate
from mpitrain.training.loop import read_batches
from mpitrain.update.agreement import NonFinite
from tests.cases import mostly_slow, slow_case
from tests.mpi.mpitrain.layouts import (
    RANKS,
    StopsAfter,
    changed,
    close,
    equal,
    in_folder,
    job,
    keep,
    mlp,
    whole,
)
from tests.mpi.mpitrain.test_sync_arithmetic import Averaging

pytestmark = pytest.mark.at_most(5)

STEPS = 9

#: Settings of each exchange, and steps of it.
KINDS = {
    "local": Sync(kind="local", period=3),
    "post-local": Sync(kind="local", period=3, start=2),
    "diloco": Sync(kind="local", period=4, outer="nesterov:lr=0.7,momentum=0.9"),
    "delayed": Sync(kind="delayed", period=2, delay=3),
    "delayed, later": Sync(kind="delayed", period=1, delay=4, start=1),
}
#: Workers with samples of their own, whose updates take effect late.
UNCORRECTED = Sync(kind="delayed", period=2, delay=3, correct=False, split="dirichlet")


#: Layouts of replicas of all kinds; the other stages and tensor ranks are of the worker.
LAYOUTS = {"data": {}}
if RANKS % 2 == 0:
    LAYOUTS |= {"data x pipe": dict(pipe=2), "data x tensor": dict(tensor=2)}


def config_of(model, kind, optim=None, **parallel):
    sync = KINDS.get(kind, UNCORRECTED)
    config = replace(job(model, micro_batches=2, **parallel), sync=sync)
    return changed(replace(config, optim=optim) if optim else config, check_every=1)


def own_part(batch, workers, worker, micro_batches=2):
    """The samples of a worker: every ``workers``-th micro-batch."""
    count = micro_batches * workers
    return np.concatenate(
        [batch[share(len(batch), m, count)] for m in range(worker, count, workers)]
    )


class Alone:
    """A worker in a process of its own, which computes gradients and takes steps."""

    def __init__(self, config):
        plain = replace(config, parallel=job("mlp").parallel, sync=Sync())
        self.trainer = start(MPI.COMM_SELF, changed(plain, micro_batches=1))
        store = self.trainer.parts.store
        self.weights, self.gradients = store.parameters, store.gradients

    def backward(self, samples, share):
        """Gradients of samples, times their ``share`` of the batch; returns its loss times it."""
        trainer, passes = self.trainer, self.trainer.parts.passes
        trainer.parts.store.reset()
        ((_, batches, held),) = read_batches(trainer.parts, 0, iter([samples]))
        (loss,) = passes.runner().run(
            passes.source(held, batches),
            Latest(passes.weights),
            trainer.parts.store,
            lambda number, loss: loss,
            lambda m: passes.context(trainer.parts.steps_done, samples),
        )
        self.gradients *= share
        return loss * share

    def update(self, step):
        trainer = self.trainer
        norm, most = np.linalg.norm(self.gradients), trainer.parts.config.optim.clip_norm
        trainer.parts.updater.step(
            trainer.parts.rates.rate(step), min(1.0, most / (norm + 1e-6)) if most else 1.0
        )
        trainer.parts.steps_done += 1
        return norm


def simulated(config, workers, steps, sampler=None, averaging=Averaging):
    """(loss and gradient norm of each step, each worker's weights, their mean)."""
    sync, curve = config.sync, []
    everyone = [Alone(config) for _ in range(workers)]
    trainer = everyone[0].trainer
    averaging = averaging(sync, [w.weights for w in everyone])
    batches = (sampler or trainer.parts.sampler).batches(0)
    for step, batch in zip(range(steps), batches, strict=False):
        loss = 0.0
        for number, worker in enumerate(everyone):
            own = own_part(batch, workers, number)
            loss += worker.backward(own, len(own) * workers / len(batch)) / workers
        if step < sync.start:
            mean = sum(w.gradients for w in everyone) / workers
            for worker in everyone:
                worker.gradients[...] = mean
        squares = [worker.update(step) ** 2 for worker in everyone]
        averaging.after(step)
        curve.append((loss, np.sqrt(np.mean(squares))))
    weights = [whole(MPI.COMM_SELF, worker.trainer) for worker in everyone]
    for worker in everyone:
        worker.trainer.close()
    mean = {name: np.mean([w[name] for w in weights], axis=0) for name in weights[0]}
    return np.array(curve), weights, mean


def of_worker(comm, trainer):
    """The own worker's weights; collective."""
    worker = comm.Split(trainer.parts.grid.place.replica, comm.rank)
    found = whole(worker, trainer)
    worker.Free()
    return found


def trained(comm, config, steps=STEPS):
    """(loss and norm of each step, the own worker's weights, what all have together)."""
    with start(comm, config) as trainer:
        records = list(islice(trainer.run_epoch(0), steps))
        assert all(isinstance(record, Step) for record in records)
        own = of_worker(comm, trainer)
        trainer.parts.drain()
        trainer.parts.check_replicas("after the drain")
        curve = np.array([(record.loss, record.grad_norm) for record in records])
        return curve, trainer.parts.grid.place.replica, own, whole(comm, trainer)


def expect_processes(comm, config, sampler=None, curve=1e-9, rtol=1e-7, atol=1e-10):
    """The workers train as processes do that know of no others."""
    found, replica, own, together = trained(comm, config)
    workers = RANKS // config.parallel.pipe // config.parallel.tensor
    expected, weights, mean = simulated(config, workers, STEPS, sampler)
    np.testing.assert_allclose(found, expected, rtol=curve)
    close(own, weights[replica], rtol=rtol, atol=atol)
    close(together, mean, rtol=rtol, atol=atol)


@pytest.mark.parametrize("kind", mostly_slow(KINDS, ["diloco"]))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_train_as_workers_do_that_know_of_no_layout(comm, layout, kind):
    model = "gpt" if layout != "data" else "mlp"
    expect_processes(comm, config_of(model, kind, **LAYOUTS[layout]))


def test_workers_with_samples_of_their_own_are_processes_with_these(comm):
    sync = replace(KINDS["local"], split="dirichlet", alpha=0.3)
    config = replace(config_of("mlp", "local"), sync=sync)
    with start(comm, config) as trainer:
        sampler = trainer.parts.sampler
        classes = [trainer.parts.data.train[own].labels for own in sampler.own]
    if RANKS > 1:
        assert len({np.bincount(own, minlength=10).argmax() for own in classes}) > 1
    for batch in sampler.batches(1):
        assert len(batch) in (24, 1437 % 24)
        for worker, own in enumerate(sampler.own):
            assert np.isin(own_part(batch, RANKS, worker), own).all()
    expect_processes(comm, config, sampler)


@pytest.mark.parametrize("name", ["lamb", slow_case("adam")])
@pytest.mark.parametrize("kind", ["local", slow_case("delayed")])
def test_other_optimisers_and_clipping_are_each_workers_own(comm, kind, name):
    optim = Optim(name=name, lr=0.01, reference_batch=0, clip_norm=0.5, weight_decay=0.01)
    expect_processes(comm, config_of("mlp", kind, optim), curve=1e-7, rtol=1e-6, atol=1e-9)


QUICK = ("diloco", "delayed", "uncorrected", "delayed coded")


@pytest.mark.parametrize("at", [slow_case(3), slow_case(4), 5])
@pytest.mark.parametrize("kind", mostly_slow([*KINDS, *QUICK[2:], "local coded"], QUICK))
def test_a_run_that_was_killed_goes_on_bit_by_bit(comm, folder, kind, at):
    optim = Optim(name="adam", lr=0.01, reference_batch=0, average=0.9)
    config = config_of("mlp", kind.removesuffix(" coded"), optim)
    config = in_folder(config, folder, run={"dtype": "float32"})
    if kind.endswith("coded"):  # what codes leave out is kept
        codec, delay = {"codec": "powersgd:rank=2", "least": 32}, min(config.sync.delay, 2)
        config = changed(config, compress=codec, delay=delay)
    expected, _, weights, together = trained(comm, config)
    with start(comm, config) as trainer:
        list(islice(trainer.run_epoch(0), at))
        writer = Writer(comm, checkpoints(config), keep=2)
        save(trainer.parts, writer)
        evaluate(trainer.parts, 0)  # which leaves the workers as they are
        rest = list(islice(trainer.run_epoch(0), STEPS - at))
        writer.finish()
    np.testing.assert_array_equal([(r.loss, r.grad_norm) for r in rest], expected[at:])
    with start(comm, config) as trainer:
        assert resume(trainer.parts).step == at
        trainer.parts.check_replicas("after the resume")
        again = list(islice(trainer.run_epoch(0), STEPS - at))
        for one, other in zip(again, rest, strict=True):
            assert replace(one.sync, drift=0.0) == replace(other.sync, drift=0.0)
            assert one.sync.drift == pytest.approx(other.sync.drift, rel=1e-12)
        np.testing.assert_array_equal([(r.loss, r.grad_norm) for r in again], expected[at:])
        equal(of_worker(comm, trainer), weights)
        trainer.parts.drain()
        equal(whole(comm, trainer), together)


def numbers(step):
    sync = step.sync
    return step.step, sync.exchanges, sync.since, step.loss, step.grad_norm, sync.drift


@pytest.mark.parametrize(
    ("kind", "agree"),
    [
        *(("delayed", agree) for agree in (1, 4)),
        *(slow_case(*one) for one in (("local", 1), ("diloco", 1), ("post-local", 4))),
    ],
)
def test_a_run_that_is_stopped_ends_with_the_bits_of_one_that_was_not(
    comm, folder, kind, agree, monkeypatch
):
    """Ranks that agree after several steps stop there, with the same records in fewer messages."""
    config = config_of("mlp", kind, Optim(name="adam", lr=0.01, reference_batch=0, clip_norm=0.3))
    config = changed(config, batch_size=100, log_every=1000, epochs=1, checkpoint={"every": 4})
    with start(comm, in_folder(config, folder / "left alone")) as trainer:
        train(trainer, on_record=(records := []).append)
        expected = whole(comm, trainer)
    config = in_folder(config, folder / "stopped", agree=agree)
    stop = StopsAfter(6 if agree > 1 else 8, comm.rank == RANKS - 1)
    with start(comm, config, stop=stop) as stop.trainer, pytest.raises(Stopped, match="step 8 of"):
        train(stop.trainer)
    met, summed = [], DriftingLoop._sum
    monkeypatch.setattr(DriftingLoop, "_sum", lambda *args: met.append(1) or summed(*args))
    with start(comm, config) as trainer:
        result = train(trainer, go_on=True)
        found = whole(comm, trainer)
        trainer.parts.check_replicas("at the end")
        assert evaluate(trainer.parts, 0).test_loss == result.test_loss
    equal(found, expected)
    last = CheckpointReader(max((folder / "stopped" / "checkpoints").glob("step-*")))
    for name, values in found.items():  # what export and eval read is what the run ended with
        np.testing.assert_array_equal(last.tensor("parameters", name), values)
    others = [record for record in records if isinstance(record, Step)]
    assert len(met) == -(-(len(others) - 8) // agree)
    steps = read_records(folder / "stopped" / "metrics.jsonl").of(Step)
    for one, other in zip(steps, others, strict=True):
        assert numbers(one) == pytest.approx(numbers(other), rel=1e-12)
    assert RANKS == 1 or one.sync.drift > 0


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", mostly_slow(["delayed", "local", "diloco"], ["delayed"]))
def test_other_workers_begin_with_what_the_old_ones_had_together(comm, folder, kind):
    config = in_folder(replace(mlp("float64"), sync=KINDS[kind]), folder)
    with start(comm, config) as trainer:
        list(islice(trainer.run_epoch(0), 5))
        keep(trainer)
        velocity = comm.allreduce(trainer.parts.updater.slot("velocity")) / comm.size
        outer = np.copy(trainer.parts.strategy.shared.get("outer_velocity", ()))
        trainer.parts.drain()
        expected = whole(comm, trainer)
    for other in (config, replace(config, sync=Sync())):
        with start(MPI.COMM_SELF, other) as trainer:
            assert resume(trainer.parts).step == 5
            equal(whole(MPI.COMM_SELF, trainer), expected)
            np.testing.assert_allclose(trainer.parts.updater.slot("velocity"), velocity, rtol=1e-12)
            if other is config:
                found = trainer.parts.strategy.shared.get("outer_velocity", ())
                np.testing.assert_array_equal(found, outer)
            assert isinstance(next(trainer.run_epoch(0)), Step)
    changed = replace(config, sync=Sync(kind="local", period=2))
    with start(comm, changed) as trainer:
        assert resume(trainer.parts).step == 5
        trainer.parts.check_replicas("after the resume")
        equal(whole(comm, trainer), expected)


def test_residuals_of_gradients_are_none_of_weights(comm, folder):
    """A rate at which nothing moves shows what a resumed run brings along."""
    dense = replace(mlp("float64"), compress=Compress("topk:keep=0.1", least=1))
    dense = in_folder(dense, folder)
    with start(comm, dense) as trainer:
        list(islice(trainer.run_epoch(0), 5))
        keep(trainer)
        expected = whole(comm, trainer)
    still = replace(dense, optim=Optim(lr=1e-30), sync=Sync(kind="local", period=2))
    with start(comm, still) as trainer:
        assert resume(trainer.parts, allow_changes=True).step == 5
        list(islice(trainer.run_epoch(0), 4))
        trainer.parts.drain()
        for name, values in whole(comm, trainer).items():
            np.testing.assert_allclose(values, expected[name], rtol=1e-12, atol=1e-12)


def spoil(trainer, step, value):
    """Put a value into the last rank's gradients of a step, counted from 0."""
    parts, wait = trainer.parts, trainer.parts.store.wait

    def spoilt():
        seconds = wait()
        if parts.steps_done == step and parts.comm.rank == RANKS - 1:
            parts.store.gradients[0] = value
        return seconds

    parts.store.wait = spoilt


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["local", "delayed"])
def test_where_one_worker_overflows_all_skip_the_step(comm, kind):
    with start(comm, changed(config_of("mlp", kind), on_nonfinite="skip")) as trainer:
        spoil(trainer, 4, np.inf)
        records = list(islice(trainer.run_epoch(0), STEPS))
        assert [type(record) for record in records] == [
            Skipped if step == 4 else Step for step in range(STEPS)
        ]
        assert f"rank {RANKS - 1}: " in records[4].culprits
        assert trainer.parts.updater.steps == STEPS - 1
        assert np.isfinite(trainer.parts.strategy.consensus()).all()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("codec", [slow_case("bf16"), "powersgd:rank=2"])
@pytest.mark.parametrize("kind", [slow_case("local"), "delayed"])
def test_ways_go_by_codes(comm, kind, codec):
    dense = changed(config_of("mlp", kind), dtype="float32", delay=min(KINDS[kind].delay, 2))
    exact = trained(comm, dense, 20)[0]
    found = trained(comm, changed(dense, compress={"codec": codec, "least": 32}), 20)[0]
    assert not np.array_equal(found, exact)
    np.testing.assert_allclose(found[-1, 0], exact[-1, 0], rtol=0.2)


@pytest.mark.mpi(min_size=2)
def test_what_one_worker_cannot_compute_all_hear_of_where_they_agree(comm):
    config = changed(config_of("mlp", "local"), sync={"period": 4, "agree": 5})
    with start(comm, config) as trainer:
        spoil(trainer, 6, np.nan)
        epoch = trainer.run_epoch(0)
        assert [record.step for record in islice(epoch, 5)] == [1, 2, 3, 4, 5]
        why = rf"not finite at step 7 \(rank {RANKS - 1}: layer0"
        with pytest.raises(NonFinite, match=why) as error:
            next(epoch)
        assert [record.step for record in error.value.before] == [6]
        assert trainer.parts.steps_done == 10
        assert np.isfinite(trainer.parts.strategy.consensus()).all()
