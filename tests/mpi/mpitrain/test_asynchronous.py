"""Pipelines that do not drain, against a simulation of their stale weights in one process."""

import shutil
from collections import ChainMap
from itertools import islice

import numpy as np
import pytest
from msgspec.structs import replace

from mpitrain import nn
from mpitrain.checkpoint.saving import checkpoints
from mpitrain.config import ConfigError, Optim, Parallel
from mpitrain.metrics.reader import read_records
from mpitrain.metrics.records import Step
from mpitrain.pipeline.profiles import LayerProfile, write_profile
from mpitrain.run import train
from mpitrain.start import start
from mpitrain.training.asynchronous import UpdateWindow
from mpitrain.training.parts import Parts, UserObjects
from mpitrain.update.agreement import NonFinite
from mpitrain.update.updater import Updater
from tests.cases import slow_case
from tests.mpi.mpitrain.layouts import RANKS, changed, equal, in_folder, job, whole
from tests.mpi.mpitrain.stale import ahead, simulated

STEPS = 11
#: Widths of further layers, for as many stages as there are ranks.
DEEPER = (12,) * max(0, RANKS - 5)


def asynchronous(weights, **parallel):
    parallel |= {"schedule": "asynchronous", "window": 7, "weights": weights}
    config = job("convnet", micro_batches=1, **parallel)
    hidden = *config.model.hidden, *DEEPER
    return changed(config, hidden=hidden, epochs=1, optim={"momentum": 0.5})


def of_torch():
    """A module of torch in the place of the job's layers, as it begins."""
    torch = pytest.importorskip("torch", reason="torch is not installed: make test TORCH=1")
    from mpitrain.adapters.torch import layers

    torch.manual_seed(3)
    linear = torch.nn.Linear
    parts = [linear(64, 16), torch.nn.Tanh(), linear(16, 16), torch.nn.LayerNorm(16)]
    parts += [*(linear(16, 16) for _ in DEEPER), linear(16, 10)]
    return layers(torch.nn.Sequential(torch.nn.Flatten(), *parts).double())


def found(comm, config, layers=None):
    with start(comm, config, objects=UserObjects(layers=layers)) as trainer:
        records = [record for _, record in zip(range(STEPS), trainer.run_epoch(0))]
        trainer.parts.check_replicas("at the end")  # those of a tied tensor, too
        # The window under way is run to its end.
        return [record.loss for record in records], whole(comm, trainer), trainer.parts.steps_done


#: Stages of unequal width on so many ranks, and equal ones.
SHAPES = {
    3: [(2, 1), (1, 2)],
    4: [(2, 1, 1), (3, 1), (1, 2, 1), (2, 2)],
    5: [(3, 1, 1), (1, 3, 1)],
    8: [(4, 3, 1), (1, 6, 1), (2, 2, 2, 2)],
}


@pytest.mark.parametrize("replicas", [(1,) * RANKS, *SHAPES.get(RANKS, [])[:1]], ids=str)
def test_what_is_due_within_a_window_is_done_where_the_pipeline_drains(
    comm, folder, monkeypatch, replicas
):
    config = asynchronous("stash", replicas=replicas)
    config = replace(config, optim=Optim("adam", lr=1e-3, average=0.9))
    config = in_folder(config, folder, check_every=10, steps=25, checkpoint={"every": 5, "keep": 9})
    compared, check = [], Parts.check_replicas
    noted = lambda self, when: compared.append(when) or check(self, when)  # noqa: E731
    monkeypatch.setattr(Parts, "check_replicas", noted)
    with start(comm, config) as trainer:
        train(trainer)
        expected = whole(comm, trainer)
    comm.Barrier()
    names = sorted(path.name for path in checkpoints(config).iterdir())
    assert names == [f"step-{step:08}" for step in (7, 14, 21, 25)]
    within = [when for when in compared if when.startswith("after step")]
    assert within == ["after step 14", "after step 21"]
    comm.Barrier()
    if comm.rank == 0:
        for step in (21, 25):
            shutil.rmtree(checkpoints(config) / f"step-{step:08}")
    comm.Barrier()
    with start(comm, config) as trainer:
        train(trainer, go_on=True)
        equal(whole(comm, trainer), expected)


def check(comm, config, layers=lambda: None, rtol=0.0):
    """Compare losses and weights of a job with those of its simulation."""
    losses, weights, steps = found(comm, config, layers())
    expected, expected_weights = simulated(config, steps, layers())
    np.testing.assert_allclose(losses, expected[:STEPS], rtol=rtol)
    for name, values in expected_weights.items():
        # Bit by bit unless sums are in another order.
        np.testing.assert_allclose(weights[name], values, rtol=10 * rtol, atol=1e-3 * rtol)


@pytest.mark.quick_on(3)
@pytest.mark.parametrize("policy", ["stash", "vertical", "spectrain", "linear", "latest"])
def test_every_stage_sees_the_weights_it_should(comm, policy):
    # Recomputation repeats the forward pass by its own weights, and changes nothing.
    check(comm, asynchronous(policy, pipe=RANKS, recompute=policy == "vertical"))


@pytest.mark.quick_on(3)
@pytest.mark.parametrize("policy", [slow_case("vertical"), "stash"])
def test_modules_of_torch_see_them_too(comm, policy):
    """Autograd holds the weights of the forward pass, which an update may not write over."""
    check(comm, asynchronous(policy, pipe=RANKS), layers=of_torch, rtol=1e-11)


@pytest.mark.parametrize("policy", ["spectrain", "linear", "latest"])
def test_layers_that_go_forward_again_need_the_weights_of_the_first_time(comm, policy):
    inner = nn.Residual({"up": nn.Recomputed(nn.Linear(16, 16))})
    layers = {"in": nn.Linear(64, 16), "inner": nn.Chain({"one": inner}), "out": nn.Linear(16, 10)}
    with pytest.raises(ConfigError, match="a Recomputed layer needs the weights of the forward"):
        start(comm, asynchronous(policy), objects=UserObjects(layers=layers))


@pytest.mark.parametrize("replicas", SHAPES.get(RANKS, [])[:2], ids=str)
def test_each_tensor_keeps_its_count_of_updates_in_other_layouts(comm, folder, replicas):
    """Adam's correction of its moments goes by it."""
    optim = Optim("adam", lr=1e-3, reference_batch=0)
    config = in_folder(replace(asynchronous("stash", replicas=replicas), optim=optim), folder)
    plain = replace(config, parallel=Parallel())
    begun, counts, after = 0, {}, {}
    for kind, steps in (config, 3), (plain, 5), (config, 8), (plain, 9):
        comm.Barrier()
        with start(comm, replace(kind, train=replace(config.train, steps=steps))) as trainer:
            train(trainer, go_on=True)
            before, after = after, whole(comm, trainer)
            updater, tensors = trainer.parts.updater, trainer.parts.arena.tensors
            own = {tensor.name: updater.per_step * (steps - begun) for tensor in tensors}
            for name, count in ChainMap(*comm.allgather(own)).items():
                counts[name] = counts.get(name, 0) + count
            for name in own:
                assert updater.steps - updater.left_out.get(name, 0) == counts[name]
        begun = steps
    assert max(counts.values()) > steps, "no stage has updated more often than another"
    mean, square = updater.slot("mean"), updater.slot("square")
    for tensor in tensors:
        t, part = counts[tensor.name], slice(tensor.start, tensor.stop)
        root = np.sqrt(square[part] / (1 - optim.beta2**t)) + optim.epsilon
        moved = optim.lr * mean[part] / (1 - optim.beta1**t) / root
        found = (before[tensor.name] - after[tensor.name]).ravel()
        np.testing.assert_allclose(found, moved, rtol=1e-9, atol=1e-15)


def test_updates_take_the_rates_of_their_steps(comm, monkeypatch):
    """A run that goes on may have skipped updates, or have had several in a step."""
    taken, step = [], Updater.step

    def noted(self, lr, step_index):
        taken.append((lr, step_index))
        step(self, lr, step_index=step_index)

    monkeypatch.setattr(Updater, "step", noted)
    config = asynchronous("stash", replicas=SHAPES.get(RANKS, [(1,) * RANKS])[0])
    config = replace(config, optim=Optim(schedule="cosine", momentum=0.0))
    with start(comm, config) as trainer:
        parts = trainer.parts
        parts.steps_done = 3
        list(islice(trainer.run_epoch(0), 12))
        numbers = [n for n in range(3, parts.steps_done) for _ in range(parts.updater.per_step)]
        assert taken == [(parts.rates.rate(number), number) for number in numbers]


@pytest.mark.parametrize("replicas", [(1,) * RANKS, *SHAPES.get(RANKS, [])[:1]], ids=str)
def test_old_weights_are_kept_no_longer_than_they_are_needed(comm, monkeypatch, replicas):
    kept, update = [], UpdateWindow.update

    def watched(self, number, loss):
        updated = update(self, number, loss)
        kept.append(len(self.weights._kept))
        return updated

    monkeypatch.setattr(UpdateWindow, "update", watched)
    with start(comm, asynchronous("stash", replicas=replicas)) as trainer:
        list(trainer.run_epoch(0))
    assert max(kept) <= ahead(replicas[trainer.parts.grid.place.stage :])


@pytest.mark.parametrize("replicas", SHAPES.get(RANKS, []), ids=str)
def test_stages_that_share_a_tensor_update_equally_often(comm, replicas):
    config = job("gpt", micro_batches=1)
    stale = Parallel(schedule="asynchronous", window=3, replicas=replicas)
    config = replace(config, optim=Optim(lr=0.05, clip_norm=0.0), parallel=stale)
    if replicas[0] == replicas[-1]:
        check(comm, config, rtol=1e-11)
        return
    with pytest.raises(ConfigError, match=r"share embed.*give these stages equally many"):
        start(comm, config)


def test_a_sample_that_is_not_finite_is_named_on_all_ranks(comm, folder):
    """The records of the steps before it are those of a run without it."""
    config, losses = in_folder(asynchronous("stash", pipe=RANKS), folder, steps=14), {}
    with start(comm, asynchronous("stash", pipe=RANKS)) as trainer:
        wanted = [record.loss for record in islice(trainer.run_epoch(0), 8)]
    seen = lambda one: losses.update({one.step: one.loss} if isinstance(one, Step) else {})  # noqa: E731
    with start(comm, config) as trainer:
        sample = next(islice(trainer.parts.sampler.batches(0), 8, None))[3]
        trainer.parts.data.train.inputs[sample] = np.nan
        told = rf"at step 9 \(rank 0: the inputs of sample {sample} to train on hold nan"
        with pytest.raises(NonFinite, match=told):
            train(trainer, on_record=seen)
    assert losses == dict(enumerate(wanted, 1))
    if comm.rank == 0:
        told = read_records(folder / "metrics.jsonl").of(Step)
        assert [one.step for one in told] == [*range(1, 9)]


@pytest.mark.skipif(RANKS not in (2, 3), reason="2 and 3 ranks show it")
def test_a_trainer_that_resumes_takes_the_stages_of_its_checkpoint(comm, folder):
    """Not those that the changed profile gives, with which it was made; bit by bit as unbroken."""
    fits = pytest.importorskip("tests.mpi.mpitrain.fits")
    profile = folder / "profile.json"

    def write(heavy):
        if comm.rank == 0:
            light = [LayerProfile(f"part{i}", 1, 2 + bool(i), 1, 1) for i in range(4)]
            last = (0.5, 1, 1, 1e10) if heavy else (1, 3, 1, 1)
            write_profile(profile, [*light, LayerProfile("part4", *last)])
        comm.Barrier()

    def trainer(run, steps):
        parallel = {"schedule": "asynchronous", "window": 2, "partition": "auto"}
        parallel |= {"profile": str(profile), "links": [0.001]}
        given = {"train_data": fits.Waves(120, 1, 0), "test_data": None, "metrics": None}
        given |= {"steps": steps, "checkpoint": {"every": 2}, "parallel": parallel}
        return fits.made(folder / run, comm, **given)

    write(heavy=True)
    with trainer("unbroken", 8) as one:
        one.fit()
        expected = whole(comm, one)
    with trainer("broken", 4) as one:
        one.fit()
    write(heavy=False)
    with trainer("broken", 8) as one:
        assert one.config.parallel.replicas == (RANKS,)
        one.fit(resume=True)
        assert one.config.parallel.replicas == (RANKS - 1, 1)
        equal(whole(comm, one), expected)
        found = np.concatenate([p.detach().numpy().ravel() for p in one.module.parameters()])
        trained = np.concatenate([value.ravel() for value in expected.values()])
        assert np.array_equal(np.sort(found), np.sort(trained.astype(found.dtype)))
    with trainer("broken", 4) as one:  # begins anew
        one.fit()
        assert one.config.parallel.replicas == (RANKS,)
