"""Pipelines that do not drain, against a simulation of their stale weights in one process."""

import shutil
from itertools import pairwise

import numpy as np
import pytest
from mpi4py import MPI
from msgspec.structs import replace

from collectives import Communicator
from mpitrain.checkpoint.saving import checkpoints
from mpitrain.config import Checkpoint, ConfigError, Train
from mpitrain.run import train
from mpitrain.start import start
from mpitrain.step.agreement import NonFinite
from mpitrain.training.batches import MicroBatches, part
from mpitrain.training.parts import Parts, UserObjects
from tests.mpi.mpitrain.layouts import equal, in_folder, job, whole

pytestmark = [pytest.mark.mpi, pytest.mark.at_most(5)]

RANKS = MPI.COMM_WORLD.size
STEPS = 11


def asynchronous(weights, micro_batches=1, **parallel):
    config = job("convnet", weights=weights, schedule="asynchronous", window=7, **parallel)
    return replace(
        config,
        train=Train(epochs=1, batch_size=24, micro_batches=micro_batches),
        optim=replace(config.optim, momentum=0.5),
    )


def of_torch():
    """A module of torch in the place of the job's layers, as it begins."""
    torch = pytest.importorskip("torch", reason="torch is not installed: make test TORCH=1")
    from mpitrain.adapters.torch import layers

    torch.set_num_threads(1)
    torch.manual_seed(3)
    linear = torch.nn.Linear
    parts = linear(64, 16), torch.nn.Tanh(), linear(16, 16), torch.nn.LayerNorm(16), linear(16, 10)
    return layers(torch.nn.Sequential(torch.nn.Flatten(), *parts).double())


def found(comm, config, layers=None):
    with start(comm, config, objects=UserObjects(layers=layers)) as trainer:
        records = [record for _, record in zip(range(STEPS), trainer.run_epoch(0))]
        # The window under way is run to its end.
        return [record.loss for record in records], whole(comm, trainer), trainer.parts.steps_done


def test_what_is_due_within_a_window_is_done_where_the_pipeline_drains(comm, folder, monkeypatch):
    config = in_folder(asynchronous("stash", pipe=RANKS), folder)
    config = replace(
        config,
        run=replace(config.run, check_every=10),
        train=replace(config.train, steps=25),
        checkpoint=Checkpoint(every=5, keep=9),
    )
    compared, check = [], Parts.check_replicas
    noted = lambda self, when: compared.append(when) or check(self, when)  # noqa: E731
    monkeypatch.setattr(Parts, "check_replicas", noted)
    with start(comm, config) as trainer:
        train(trainer)
        expected = whole(comm, trainer)
    comm.Barrier()
    names = sorted(path.name for path in checkpoints(config).iterdir())
    assert names == [f"step-{step:08}" for step in (7, 14, 21, 25)]
    assert [when for when in compared if "after step" in when[:10]] == [
        "after step 14", "after step 21"
    ]  # fmt: skip
    comm.Barrier()
    if comm.rank == 0:
        for step in (21, 25):
            shutil.rmtree(checkpoints(config) / f"step-{step:08}")
    comm.Barrier()
    with start(comm, config) as trainer:
        train(trainer, go_on=True)
        equal(whole(comm, trainer), expected)


class Simulation:
    """All stages in one process; every version of the weights is kept."""

    def __init__(self, config, stages, policy, accumulate, parts, layers=None):
        self.stages, self.policy = stages, policy
        self.accumulate, self.parts = accumulate, parts
        self.config = config
        with Communicator(MPI.COMM_SELF) as one:
            plain = replace(config, parallel=replace(config.parallel, pipe=1, schedule="1f1b"))
            with start(one, plain, objects=UserObjects(layers=layers)) as trainer:
                self.model, self.sampler = trainer.parts.model, trainer.parts.sampler
                self.data = trainer.parts.data
        names = list(self.model.layers)
        bounds = [len(names) * s // stages for s in range(stages + 1)]
        self.names = [names[a:b] for a, b in pairwise(bounds)]
        initial = self.model.initial(names, config.run.seed, np, config.run.dtype)
        self.weights = [[{n: initial[n] for n in own}] for own in self.names]
        self.speed = [
            {n: {k: np.zeros_like(v) for k, v in initial[n].items()} for n in own}
            for own in self.names
        ]

    def version(self, stage, micro_batch):
        """Updates of a stage before its forward pass, where nothing is replicated."""
        ahead = self.stages - 1 - stage
        return max(0, micro_batch - ahead) // self.accumulate

    def due(self, stage, micro_batch):
        match self.policy:
            case "vertical":
                return self.version(0, micro_batch)
            case "two_buffers":
                return max(0, micro_batch // self.accumulate - 1)
            case _:
                return self.version(stage, micro_batch)

    def forward_weights(self, stage, micro_batch, lr):
        # What was known at that time: later versions do not exist yet.
        at = self.due(stage, micro_batch)
        latest = self.weights[stage][at]
        if self.policy not in ("spectrain", "linear"):
            return latest
        ahead = micro_batch // self.accumulate - at
        moved = {}
        for name, layer in latest.items():
            moved[name] = {}
            for key, value in layer.items():
                if self.policy == "spectrain":
                    motion = -lr * self.history[stage][at][name][key]
                else:
                    before = self.weights[stage][max(at - 1, 0)][name][key]
                    motion = value - before
                moved[name][key] = value + ahead * motion
        return moved

    def run(self, batches, lr):
        """Losses of the batches; the pipeline drains after them."""
        for stage in range(self.stages):
            self.weights[stage] = self.weights[stage][-1:]
        self.history = [[speed] for speed in self.speed]
        held = {
            m: self.data.train[part(batches, self.parts, m)]
            for m in range(len(batches) * self.parts)
        }
        source = MicroBatches(
            held, batches, self.parts, self.model.loss, dtype=self.config.run.dtype
        )
        losses = []
        sums = [{} for _ in range(self.stages)]
        for m in range(len(batches) * self.parts):
            x, saved = source.inputs(m), []
            for stage, own in enumerate(self.names):
                weights = self.forward_weights(stage, m, lr)
                for name in own:
                    x, memory = self.model.layers[name].forward(weights[name], x)
                    saved.append((stage, name, weights, memory))
            loss, dy = source.loss(m, x)
            losses.append(loss)
            for stage, name, weights, memory in reversed(saved):
                if self.policy in ("spectrain", "linear", "latest"):
                    weights = self.weights[stage][-1]
                layer = self.model.layers[name]
                dy, kept = layer.backward(weights[name], memory, dy)
                for key, gradient in layer.gradients(weights[name], kept).items():
                    sums[stage][name, key] = sums[stage].get((name, key), 0) + gradient
            if (m + 1) % self.accumulate == 0:
                for stage in range(self.stages):
                    self.update(stage, sums[stage], lr)
                sums = [{} for _ in range(self.stages)]
        return [sum(losses[i : i + self.parts]) for i in range(0, len(losses), self.parts)]

    def update(self, stage, sums, lr):
        optim = self.config.optim
        after, speed = {}, {}
        for name, layer in self.weights[stage][-1].items():
            after[name], speed[name] = {}, {}
            for key, value in layer.items():
                direction = sums[name, key] + optim.weight_decay * value
                speed[name][key] = optim.momentum * self.speed[stage][name][key] + direction
                after[name][key] = value - speed[name][key] * lr
        self.weights[stage].append(after)
        self.speed[stage] = speed
        self.history[stage].append(speed)


def simulated(config, stages, policy, steps, layers=None):
    parts = config.train.micro_batches
    simulation = Simulation(config, stages, policy, parts, parts, layers)
    lr = config.optim.lr * config.train.batch_size / config.optim.reference_batch
    batches = list(simulation.sampler.batches(0))[:steps]
    losses = []
    for first in range(0, steps, config.parallel.window):
        losses += simulation.run(batches[first : first + config.parallel.window], lr)
    last = {
        f"{name}.{key}": value
        for own in simulation.weights
        for name, layer in own[-1].items()
        for key, value in layer.items()
    }
    return losses, last


def check(comm, config, simulated_as=None, layers=lambda: None, rtol=0.0):
    """Compare losses and weights of a job with those of the simulation of it, or of another."""
    losses, weights, steps = found(comm, config, layers())
    stages, policy = config.parallel.pipe, config.parallel.weights
    expected, expected_weights = simulated(simulated_as or config, stages, policy, steps, layers())
    np.testing.assert_allclose(losses, expected[:STEPS], rtol=rtol)
    for name, values in expected_weights.items():
        # Bit by bit unless sums are in another order.
        np.testing.assert_allclose(weights[name], values, rtol=10 * rtol, atol=1e-3 * rtol)


@pytest.mark.quick_on(3)
@pytest.mark.parametrize("policy", ["stash", "vertical", "spectrain", "linear", "latest"])
def test_every_stage_sees_the_weights_it_should(comm, policy):
    if RANKS > 5:
        pytest.skip("the model has 5 layers")
    check(comm, asynchronous(policy, pipe=RANKS))


@pytest.mark.quick_on(3)
@pytest.mark.parametrize("policy", [pytest.param("vertical", marks=pytest.mark.slow), "stash"])
def test_modules_of_torch_see_them_too(comm, policy):
    """Autograd holds the weights of the forward pass, which an update may not write over."""
    if RANKS > 5:
        pytest.skip("the model has 6 layers, as of 5 stages")
    check(comm, asynchronous(policy, pipe=RANKS), layers=of_torch, rtol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["spectrain", "linear", "latest"])
def test_modules_of_torch_go_backward_by_their_own_weights(comm, policy):
    with pytest.raises(ConfigError, match="a torch module needs the weights of the forward pass"):
        start(
            comm, asynchronous(policy, pipe=min(RANKS, 5)), objects=UserObjects(layers=of_torch())
        )


@pytest.mark.quick_on(3)
def test_two_buffers_see_the_batch_before(comm):
    if RANKS > 5:
        pytest.skip("the model has 5 layers")
    config = asynchronous("two_buffers", micro_batches=4, pipe=RANKS)
    losses, weights, steps = found(comm, config)
    expected, expected_weights = simulated(config, RANKS, "two_buffers", steps)
    np.testing.assert_allclose(losses, expected[:STEPS], rtol=1e-14)
    equal(weights, expected_weights)


def test_replicas_of_stages_meet_in_their_sums(comm):
    if RANKS not in (4, 8):
        pytest.skip("needs replicas of 2 or 4 stages")
    config = asynchronous("stash", pipe=RANKS // 2)
    # A micro-batch of both replicas is one of the simulation.
    whole_batches = replace(config, train=replace(config.train, micro_batches=1))
    check(comm, config, whole_batches, rtol=1e-10)


def test_old_weights_are_kept_no_longer_than_they_are_needed(comm):
    if RANKS > 5:
        pytest.skip("the model has 5 layers")
    from mpitrain.training.asynchronous import UpdateWindow

    most = []
    original = UpdateWindow.update

    def watched(self, number, loss):
        updated = original(self, number, loss)
        most.append(self.weights.versions_held)
        return updated

    config = asynchronous("stash", pipe=RANKS)
    with start(comm, config) as trainer:
        stage = trainer.parts.grid.place.stage
        UpdateWindow.update = watched
        try:
            list(trainer.run_epoch(0))
        finally:
            UpdateWindow.update = original
    assert max(most) <= RANKS - stage


def test_two_buffers_need_enough_micro_batches(comm):
    if RANKS not in (3, 4, 5):
        pytest.skip("needs 3 to 5 stages")
    with pytest.raises(ConfigError, match=r"two_buffers on \d stages needs at least"):
        start(comm, asynchronous("two_buffers", micro_batches=1, pipe=RANKS))


def test_a_sample_that_is_not_finite_is_named_on_all_ranks(comm):
    with start(comm, asynchronous("stash", pipe=RANKS)) as trainer:
        sample = next(
            batch for number, batch in enumerate(trainer.parts.sampler.batches(0)) if number
        )[3]
        trainer.parts.data.train.inputs[sample] = np.nan
        told = rf"at step 2 \(rank 0: the inputs of sample {sample} to train on hold nan"
        with pytest.raises(NonFinite, match=told):
            list(trainer.run_epoch(0))
