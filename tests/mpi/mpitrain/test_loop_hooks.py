"""Work that a loop of torch does between steps: rates by tests, clipping by value, early ends."""

import copy
import io
from contextlib import nullcontext
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

from mpitrain.config import ConfigError
from mpitrain.metrics.records import Epoch, Saved, Step, Summary
from tests.cases import slow_case
from tests.mpi.mpitrain.fits import PARALLEL, assert_alike, loop, made, mse, net, torch, torchs_own
from tests.zoo.parts import Of

ReduceLROnPlateau = torch.optim.lr_scheduler.ReduceLROnPlateau
StepLR, swa_utils = torch.optim.lr_scheduler.StepLR, torch.optim.swa_utils
pytestmark = pytest.mark.at_most(4)
EPOCHS, PER_EPOCH = 6, 5


def adamw(parameters):
    """Two groups, of which the second has a rate of its own."""
    first, *rest = parameters
    return torch.optim.AdamW([{"params": rest}, {"params": [first], "lr": 0.03}], lr=0.1)


def plateau(optimizer):
    """Falls twice in these epochs; the second group cannot fall below its least rate."""
    return ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.2, min_lr=[0, 0.02])


def followed(trainer, schedule, watch=mse):
    """Module, rates and tests of plain torch's loop, whose scheduler follows the tests."""
    found = []
    x, label = map(torch.from_numpy, vars(trainer.parts.data.test[:]).values())

    def test(module):
        with torch.no_grad():
            found.append(watch(module(x), label).item())
        return found[-1]

    return *torchs_own(trainer, adamw, schedule, test=test), found


class Seen:
    """Keeps the records that a trainer tells, and may act on them."""

    def __init__(self, act=lambda record: None):
        self.records, self.act = [], act

    def __call__(self, record):
        self.records.append(record)
        self.act(record)

    def of(self, kind):
        return [record for record in self.records if isinstance(record, kind)]

    @property
    def rates(self):
        return [record.lr for record in self.of(Step)]


def job(folder, **changed):
    return made(folder, **{"optimizer": adamw, "epochs": EPOCHS} | changed)


def fitted(folder, **changed):
    seen = Seen()
    with job(folder, **changed) as trainer:
        trainer.fit(on_record=seen)
    return trainer, seen


def near(y, t):
    return ((y - t).abs() < 1).double().mean()


def highest(optimizer):
    return ReduceLROnPlateau(optimizer, mode="max", patience=0)


BY_NEAR = {"watch": "near", "metrics": {"near": near}, "schedule_by": "epoch"}


@pytest.mark.parametrize(
    ("schedule", "watch", "how"), [(plateau, mse, {}), slow_case(highest, near, BY_NEAR)]
)
def test_rates_fall_where_tests_get_no_better_as_in_torch(folder, schedule, watch, how):
    trainer, seen = fitted(folder, schedule=schedule, parallel=PARALLEL, **how)
    module, rates, found = followed(trainer, schedule, watch)
    assert len(set(rates)) > (1 if how else 2)
    np.testing.assert_allclose(seen.rates, rates, rtol=1e-12)
    told = [test.metrics["near"] if how else test.test_loss for test in seen.of(Epoch)]
    np.testing.assert_allclose(told, found, rtol=1e-8)
    assert_alike(trainer.module, module)
    untested = job(folder, schedule=schedule, **how)
    with untested as trainer, pytest.raises(ConfigError, match="a loop of your own makes none"):
        list(trainer.run_epoch(0))


def test_a_program_ends_saves_and_turns_the_rate_down(folder):
    """It ends within an epoch, and goes on later as if it had not ended."""
    total, end = EPOCHS * PER_EPOCH, 2 * PER_EPOCH + 2

    def run(where, *, ends=False, resume=False):
        def act(record):
            if isinstance(record, Step) and record.step % PER_EPOCH == 0:
                trainer.rate_factor *= 0.5
            if isinstance(record, Step) and record.step == 4:
                trainer.save()
            if isinstance(record, Step) and record.step == end and ends:
                trainer.end("good enough")

        seen = Seen(act)
        with job(folder, dir=str(folder / where), parallel=PARALLEL) as trainer:
            seen.tests = trainer.fit(resume=resume, on_record=seen)
        return trainer.module, seen

    module, whole = run("whole")
    assert [saved.step for saved in whole.of(Saved)] == [4, total]
    expected = [0.1 * 0.5 ** (step // PER_EPOCH) for step in range(total)]
    np.testing.assert_allclose(whole.rates, expected, rtol=1e-12)
    (told,) = whole.of(Summary)
    moved = told.sent_bytes + told.shared_bytes
    assert moved * (1 - 1e-9) <= told.busiest_bytes <= 4 * moved
    _, first = run("again", ends=True)
    assert len(first.of(Step)) == end
    assert first.tests == first.of(Epoch) and len(first.tests) == 3
    assert first.of(Summary)[0].ended == "good enough"
    other, rest = run("again", resume=True)
    assert first.rates + rest.rates == whole.rates
    assert_alike(other, module, rtol=0, atol=0)


def test_a_module_has_no_values_of_steps_that_come_again(folder):
    """Values of step 2, gathered before the loss spiked in step 3."""
    spoilt, refused = [], []

    def spoil(parts):
        if parts.steps_done == 2 and not spoilt:
            spoilt.append(True)
            for piece in parts.store.pieces:
                piece.parameters[...] *= 1e3
            parts.refresh()

    def act(record):
        if isinstance(record, Step) and record.step == 2:
            if not spoilt:
                trainer.gather()
                return
            with pytest.raises(RuntimeError, match=r"trainer\.gather"):
                trainer.module[0].weight.sum()
            refused.append(True)

    run = {"on_spike": "repeat", "spike_window": 1}
    keys = {"run": run, "checkpoint": {"every": 50}, "before_step": spoil}
    with job(folder, epochs=1, **keys) as trainer:
        trainer.fit(on_record=act)
    assert refused == [True]


class Mean:
    """A running mean of a module's values, as torch makes it."""

    def __call__(self, module):
        if not hasattr(self, "own"):
            mean = swa_utils.get_ema_multi_avg_fn(0.8)
            self.own = swa_utils.AveragedModel(module, multi_avg_fn=mean)
        self.own.update_parameters(module)


def wide():
    return net().double()


@pytest.mark.slow
def test_a_program_averages_the_values_of_each_step(folder):
    """As beside a loop of torch; training goes on with the same bits as without."""
    found, wanted = Mean(), Mean()

    def act(record):
        if isinstance(record, Step):
            found(trainer.gather())

    with job(folder, model=wide, parallel=PARALLEL) as trainer:
        trainer.fit(on_record=act)
    torchs_own(trainer, adamw, None, see=wanted)
    torch.testing.assert_close(found.own.state_dict(), wanted.own.state_dict(), rtol=1e-8, atol=0)
    unseen, _ = fitted(folder, model=wide, parallel=PARALLEL)
    assert_alike(trainer.module, unseen.module, rtol=0, atol=0)


def sample(module):
    return module(torch.zeros(1, 6, dtype=torch.float64))


LOOKS = [
    Mean(), sample, copy.deepcopy, torch.nn.Module.state_dict,
    lambda module: torch.save(module, io.BytesIO()),
    lambda module: next(module.parameters()).tolist(),
    lambda module: torch.nn.utils.parameters_to_vector(module.parameters()),
]  # fmt: skip
CHANGES = [
    lambda module: next(module.parameters()).data.clamp_(-1, 1),
    lambda module: torch.nn.init.zeros_(next(module.parameters())),
    lambda module: module.load_state_dict(wide().state_dict()),
]


def test_values_of_the_past_are_nobodys(comm, folder):
    """Neither those of the module that a program has kept, nor of the trainer's."""
    torch.manual_seed(7)
    module, steps = wide(), []

    def act(record):
        if isinstance(record, Step):
            assert sum(p.numel() for p in module.parameters()) > 0
            for look in LOOKS:
                with pytest.raises(RuntimeError, match=r"call trainer\.gather\(\) on all ranks"):
                    look(module)
            before = sample(trainer.gather())
            for change in CHANGES:
                with pytest.raises(RuntimeError, match="on_record changes the trainer's module"):
                    change(trainer.module)
            assert torch.equal(sample(module), before)
            steps.append(before)
        elif not isinstance(record, Epoch):
            with pytest.raises(RuntimeError, match="call it for a Step or an Epoch"):
                trainer.gather()

    with job(folder, model=module, steps=4) as trainer:
        trainer.fit(on_record=act)
        assert len({one.item() for one in steps}) == 4
        assert torch.equal(sample(trainer.module), steps[-1])
    with job(folder, model=wide) as trainer:
        next(trainer.run_epoch(0))
        with pytest.raises(RuntimeError, match=r"call trainer\.gather\(\) on all ranks"):
            sample(trainer.module)
        assert torch.equal(sample(trainer.gather()), steps[0])
    if comm.size > 1:
        one = lambda record: comm.rank == 0 and isinstance(record, Step) and trainer.gather()  # noqa: E731
        with (
            job(folder) as trainer,
            pytest.raises(ConfigError, match=r"gather\(\) in on_record is True on rank 0 and"),
        ):
            trainer.fit(on_record=one)


class Annealed(torch.nn.Module):
    """With attributes that its program changes, batch norm and a cut between them."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = torch.nn.Linear(6, 16), torch.nn.Linear(16, 1)
        self.norm, self.heat, self.own = torch.nn.BatchNorm1d(16), 1.0, SimpleNamespace(heat=1.0)

    def forward(self, x):
        return self.leave(self.norm(self.enter(x) * self.heat).tanh() * self.own.heat)

    def anneal(self, *_):
        self.heat *= 1.1
        self.own.heat *= 1.1
        self.norm.momentum *= 0.9


class Deep(Annealed):
    """With an attribute that only the program's own module has."""

    def __init__(self):
        super().__init__()
        self.deep, self.own = {"own": self.own}, None

    def forward(self, x):
        return self.leave(self.norm(self.enter(x)).tanh() * self.deep["own"].heat)

    def anneal(self, *_):
        self.deep["own"].heat *= 1.1


def heated():
    return Of(lambda m, x: torch.tanh(x * m.heat), heat=1.0)


class Twice(torch.nn.Sequential):
    """One part in two layers, each with batch norm."""

    def __init__(self):
        heat = heated()
        first, second = (torch.nn.Sequential(heat, torch.nn.BatchNorm1d(6)) for _ in range(2))
        super().__init__(first, torch.nn.Linear(6, 6), second, torch.nn.Linear(6, 1))

    def anneal(self, *_):
        self[0][0].heat *= 1.1


@pytest.mark.parametrize("by", ["record", "hook", "loop", "twice", "deep"])
def test_attributes_of_the_module_may_change_between_steps(folder, by):
    def on_record(record):
        if isinstance(record, Step) and by in ("record", "twice"):
            trainer.module.anneal()

    def before_step(parts):
        if by == "hook" and parts.steps_done:
            annealed.anneal()

    parallel = {"zero": 3} if MPI.COMM_WORLD.size % 2 else {"pipe": 2}
    make, cuts = {"twice": (Twice, ()), "deep": (Deep, ())}.get(by, (Annealed, ["enter"]))
    asked = {"parallel": parallel, "cuts": cuts, "micro_batches": 1, "shadow": 8, "epochs": 2}
    if by == "deep":
        asked |= {"parallel": {}, "shadow": 0}
    torch.manual_seed(7)
    annealed = make()
    with job(folder, model=annealed, before_step=before_step, **asked) as trainer:
        if by in ("loop", "deep"):
            for epoch in range(2):
                for _ in trainer.steps(epoch):
                    annealed.anneal()
            trainer.gather()
        else:
            trainer.fit(on_record=on_record)
        assert_alike(annealed, torchs_own(trainer, adamw, None, make, see=make.anneal)[0])


class Weighed(torch.nn.Module):
    """It weighs two means in a loss of its own."""

    def __init__(self):
        super().__init__()
        self.heat, self.weight = heated(), 1.0
        self.first = torch.nn.Sequential(self.heat, torch.nn.BatchNorm1d(6))
        self.second = torch.nn.Sequential(self.heat, torch.nn.Linear(6, 1))

    def forward(self, x, labels):
        found = self.second(self.first(x))
        small = mse(found, torch.zeros_like(found))
        return {"loss": mse(found, labels) + self.weight * small, "y": found}

    def anneal(self):
        self.weight, self.heat.heat = self.weight * 1.1, self.heat.heat * 1.1


def test_weights_of_a_models_own_loss_may_change(folder):
    def on_record(record):
        if isinstance(record, Step):
            losses.append(record.loss)
            trainer.module.anneal()

    def make():
        torch.manual_seed(7)
        return Weighed().double()

    def loss(module, batch):
        found = module(x[batch], y[batch])["loss"]
        module.anneal()
        return found

    x = torch.linspace(-1, 1, 240, dtype=torch.float64).reshape(40, 6)
    y = x.sum(1, keepdim=True).sin()
    data = [{"x": one, "labels": label} for one, label in zip(x, y, strict=True)]
    kept = {"loss": "model", "metrics": None, "train_data": data, "test_data": None, "shadow": 4}
    losses = []
    with job(folder, model=make, **kept) as trainer:
        trainer.fit(on_record=on_record)
        epochs = map(trainer.parts.sampler.batches, range(EPOCHS))
        expected = loop(make(), adamw, chain.from_iterable(epochs), loss)
    np.testing.assert_allclose(losses, expected, rtol=1e-9)


def test_attributes_that_ranks_set_alike_or_not(comm, folder):
    def act(record):
        trainer.module.own.heat = 1.0 + (comm.rank == comm.size - 1)

    refused = pytest.raises(ConfigError, match=r"module\.own in on_record is .*heat.* on rank")
    with job(folder, model=Annealed) as trainer, refused if comm.size > 1 else nullcontext():
        trainer.fit(on_record=act)


def test_a_run_goes_on_in_the_same_trainer_with_constants_that_move(folder):
    def make():
        normed = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(6, 16))
        return torch.nn.Sequential(normed, torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()

    def act(record):
        if isinstance(record, Step) and record.step == 7 and not met:
            met.append(record)
            raise KeyError("once")

    met, kept = [], {"model": make, "checkpoint": {"every": 1}, "epochs": 2}
    with job(folder, **kept) as trainer:
        with pytest.raises(KeyError):
            trainer.fit(on_record=act)
        trainer.fit(resume=True, on_record=act)
    whole, _ = fitted(folder, **kept, dir=str(folder / "whole"))
    assert_alike(trainer.module, whole.module, rtol=0, atol=0)


@pytest.mark.parametrize(
    "change",
    [
        lambda module, made: made.param_groups[0].update(lr=0.5),
        lambda module, made: StepLR(made, 1).step(),
        lambda module, made: module[0].requires_grad_(False),
        lambda module, made: module.append(torch.nn.Tanh()),
        lambda module, made: module.register_parameter("more", torch.nn.Parameter(torch.ones(3))),
        lambda module, made: setattr(module[0], "bias", None),
    ],
)
def test_what_the_trainer_has_taken_over_cannot_change(folder, change):
    """The optimiser is the one that the program has made last; the shadow's is one, too."""
    made = []

    def optimizer(parameters):
        made.append(adamw(parameters))
        return made[-1]

    def act(record):
        if isinstance(record, Step) and record.step == 3:
            change(trainer.module, made[-1])

    with (
        job(folder, optimizer=optimizer, shadow=8) as trainer,
        pytest.raises(RuntimeError, match=r"on_record changes (group 0|parameters or parts)"),
    ):
        trainer.fit(on_record=act)


def test_what_a_program_asks_at_another_time_or_on_one_rank_is_refused(folder):
    def wrong(record):
        with pytest.raises(ValueError, match="a finite number from 0 on, not nan"):
            trainer.rate_factor = float("nan")
        with pytest.raises(ValueError, match="give a reason"):
            trainer.end("")
        if isinstance(record, Step) and trainer.comm.rank == 0:
            trainer.end("by one")

    refused = pytest.raises(ConfigError, match=r"end\(\) in on_record is 'by one' on rank 0")
    with job(folder) as trainer:
        turns_down = lambda: setattr(trainer, "rate_factor", 0.1)  # noqa: E731
        for ask in (lambda: trainer.end("now"), trainer.save, turns_down):
            with pytest.raises(RuntimeError, match="on_record= of fit"):
                ask()
        with refused if trainer.comm.size > 1 else nullcontext():
            trainer.fit(on_record=wrong)


def test_rates_of_clients_and_servers_are_turned_down_too(folder):
    def act(record):
        if isinstance(record, Step):
            trainer.rate_factor = 0.5**record.step

    optim = {"name": "sgd", "lr": 0.1, "reference_batch": 0, "momentum": 0.0}
    jobs = [("clients", {"federated": {"clients": 4, "rounds": 3}, "epochs": 1}, 1)]
    if MPI.COMM_WORLD.size > 1:  # servers and workers meet after an epoch
        jobs.append(("served", {"server": {"ranks": 1}}, PER_EPOCH))
    for where, more, later in jobs:
        seen = Seen(act)
        with made(folder, optim=optim, dir=str(folder / where), **more) as trainer:
            trainer.fit(on_record=seen)
        np.testing.assert_allclose([seen.rates[0], seen.rates[later]], [0.1, 0.1 * 0.5**later])
