"""Runs that go on as another job: behind the samples that were seen, with what a checkpoint has."""

import re

import numpy as np
import pytest
import torch
from mpi4py import MPI
from msgspec.structs import replace

import mpitrain
from collectives import Communicator
from collectives.calls import tables
from mpitrain.checkpoint.manifest import CheckpointError
from mpitrain.checkpoint.saving import resume
from mpitrain.config import Config, Data, Federated, Run, Train
from mpitrain.metrics.records import Epoch, Resumed, Step
from mpitrain.run import train
from mpitrain.start import start
from tests.cases import slow_case

nn = torch.nn
SAMPLES = 64


def data(samples=SAMPLES, scale=1):
    x = torch.randn(samples, 3, generator=torch.Generator().manual_seed(1)).double()
    return torch.utils.data.TensorDataset(scale * x, x.sin().sum(1, keepdim=True))


def model(frozen=False, more=False):
    torch.manual_seed(0)
    parts = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)] + [nn.Linear(1, 1)] * more
    found = nn.Sequential(*parts).double()
    found[0].requires_grad_(not frozen)
    return found


def of(kind, **options):
    return lambda p: getattr(torch.optim, kind)(p, lr=0.1, **options)


def made(place, **job):
    given = {
        "model": model, "train_data": data(), "loss": nn.functional.mse_loss, "epochs": 2,
        "batch_size": 8, "optimizer": of("SGD"), "shadow": 0,
    }  # fmt: skip
    return mpitrain.Trainer(dir=str(place), **given | job)


def fitted(place, resume=False, allow_changes=True, **job):
    """Samples of each epoch, records, and the module."""
    records, epochs = [], {}
    with made(place, **job) as trainer:
        step = trainer.loop.step

        def noted(batch):
            epochs.setdefault(batch.epoch, []).extend(np.concatenate(batch.indices).tolist())
            return step(batch)

        trainer.loop.step = noted
        go_on = resume and allow_changes
        trainer.fit(resume=resume, allow_changes=go_on, on_record=records.append)
    return epochs, records, trainer.module


def notes(records):
    return [note for one in records if isinstance(one, Resumed) for note in one.notes]


class Lists:
    """Batches of a program's own, in an order that has nothing to do with their size."""

    def __init__(self, size):
        self.lists = [list(range(SAMPLES))[i : i + size] for i in range(0, SAMPLES, size)]

    def __len__(self):
        return len(self.lists)

    def __iter__(self):
        return iter(self.lists)


def of_lists(size):
    return torch.utils.data.DataLoader(data(), batch_sampler=Lists(size))


@pytest.mark.parametrize(
    ("then", "steps", "now", "own"),
    [
        (16, 2, 8, False),
        (8, 3, 20, True),
        *(
            slow_case(*sizes, own)
            for sizes in ((8, 2, 16), (8, 8, 16), (20, 5, 8))
            for own in (False, True)
        ),
    ],
)
def test_another_size_of_batches_goes_on_behind_what_was_seen(tmp_path, then, steps, now, own):
    """In an epoch, at its end, where sizes do not divide, and when that run goes on once more."""

    def sized(size):
        return {"batch_size": size} | ({"train_data": of_lists(size)} if own else {})

    before, _, _ = fitted(tmp_path, steps=steps, **sized(then))
    middle, records, _ = fitted(tmp_path, resume=True, steps=steps + 2, **sized(now))
    after, _, _ = fitted(tmp_path, resume=True, **sized(now))
    for epoch in range(2):
        every = [one for part in (before, middle, after) for one in part.get(epoch, [])]
        assert sorted(every) == list(range(SAMPLES)), epoch
    assert [one.step for one in records if isinstance(one, Step)] == [steps + 1, steps + 2]
    assert not any("come again" in note for note in notes(records))


def test_a_table_tuned_since_then_is_named(tmp_path, monkeypatch):
    """The last digits of sums may be others, and nothing else would say so."""
    fitted(tmp_path / "run", steps=2)
    _, records, _ = fitted(tmp_path / "run", resume=True, allow_changes=False, steps=3)
    assert notes(records) == []
    tuned = tmp_path / "tuned.json"
    tuned.write_bytes(tables.DEFAULT.read_bytes() + b"\n")
    monkeypatch.setenv("COLLECTIVES_TUNING", str(tuned))
    _, records, _ = fitted(tmp_path / "run", resume=True, allow_changes=False, steps=4)
    (note,) = notes(records)
    assert re.fullmatch(
        r"sums were by .*, tuning table built-in \(\w{8}\), and are by .*, tuning table "
        rf"{tuned} \(\w{{8}}\): their last digits may differ",
        note,
    )


@pytest.mark.parametrize(
    ("schedule_by", "rates"),
    [("step", [3, 4, 5, 6, 7, 8, 9]), ("epoch", [1, 1, 1, 2, 2, 2, 2]), (None, None)],
)
def test_rates_go_by_steps_taken_or_by_epochs(tmp_path, schedule_by, rates):
    job = {"schedule": lambda step: 1 + step, "schedule_by": schedule_by}
    if schedule_by is None:
        job = {"optim": {"schedule": "step", "milestones": [1], "decay": 0.5, "momentum": 0.0}}
        job["optimizer"], rates = None, [1, 1, 1, 0.5, 0.5, 0.5, 0.5]
    fitted(tmp_path, steps=2, **job)
    _, records, _ = fitted(tmp_path, resume=True, batch_size=16, **job)
    found = np.array([one.lr for one in records if isinstance(one, Step)])
    np.testing.assert_allclose(found / found[0], np.array(rates) / rates[0])


@pytest.mark.parametrize(("schedule_by", "now", "between"), [("epoch", 16, 8), ("step", 8, 16)])
def test_rates_behind_another_size_of_batches_are_again_those_of_before(
    tmp_path, schedule_by, now, between
):
    """The run goes back to a checkpoint of before that size."""
    job = {"schedule": lambda step: 1 + step, "schedule_by": schedule_by}
    fitted(tmp_path, steps=1, batch_size=now, **job)
    fitted(tmp_path, resume=True, steps=3, batch_size=between, **job)
    with made(tmp_path, batch_size=now, **job) as trainer:
        rates = trainer.parts.rates
        before = [rates.rate(step) for step in range(rates.total_steps)]
        assert resume(trainer.parts, allow_changes=True).step == 3
        if rates.table.ahead:
            with pytest.raises(IndexError, match="step 0 comes before the first of the table, 1"):
                rates.rate(0)
        assert resume(trainer.parts, allow_changes=True, before=3).step == 1
        assert [rates.rate(step) for step in range(rates.total_steps)] == before


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({"batch_size": 16}, {"seen", "losses", "measured"}),
        ({"evaluate": {"watch": "lower mae", "patience": 3}}, {"losses"}),
        ({"loss": nn.functional.l1_loss}, set()),
        ({"train_data": data(96)}, set()),
    ],
)
def test_tests_count_as_long_as_they_measure_the_same(tmp_path, change, kept):
    """For patience, spikes, and a scheduler that follows them."""
    job = {
        "metrics": {"mae": nn.functional.l1_loss}, "test_data": data(8),
        "evaluate": {"patience": 3}, "run": {"on_spike": "repeat"}, "checkpoint": {"every": 9},
        "schedule": torch.optim.lr_scheduler.ReduceLROnPlateau,
    }  # fmt: skip
    fitted(tmp_path, steps=9, **job)
    with made(tmp_path, **job | change) as trainer:
        found, parts = resume(trainer.parts, allow_changes=True), trainer.parts
    (seen,) = parts.watch.seen.values()
    counts = {"seen": seen.step, "losses": parts.spikes.losses}
    counts["measured"] = parts.measured_rates.values
    assert {name for name, value in counts.items() if value} == kept
    assert any("ests begin anew" in note for note in found.notes) == (len(kept) < 3)


def test_samples_in_another_order_come_again_and_are_counted(tmp_path):
    fitted(tmp_path, steps=3)
    job = {"train_data": data(96), "test_data": data(8)}
    after, records, _ = fitted(tmp_path, resume=True, **job)
    assert [one.epoch for one in records if isinstance(one, Epoch)] == [0, 1]
    assert [sorted(after[epoch]) for epoch in range(2)] == [list(range(96))] * 2
    assert "the samples have another order, so that 24 of epoch 0 come again" in notes(records)


@pytest.mark.parametrize(
    ("before", "after", "new"),
    [
        ({"model": lambda: model(frozen=True)}, {}, "parameters of part0.weight"),
        ({}, {"optimizer": of("AdamW")}, "exp_avg of part0.weight"),
        ({}, {"optimizer": of("SGD", momentum=0.9)}, "momentum_buffer of part0.weight"),
        ({}, {"model": lambda: model(more=True)}, "parameters of part3.weight"),
        ({}, {"optim": {"average": 0.5}}, "average of part0.weight"),
    ],
)
def test_what_a_checkpoint_lacks_begins_as_at_the_first_step(tmp_path, before, after, new):
    _, _, old = fitted(tmp_path, steps=3, batch_size=SAMPLES, epochs=5, **before)
    values = {name: value.clone() for name, value in old.state_dict().items()}
    made = after.get("model", model)

    def changed():  # the values of the run before count, not those of the new model
        found = made()
        with torch.no_grad():
            for name, value in found.named_parameters():
                value.mul_(2 if name in values else 1)
        return found

    job = {"batch_size": SAMPLES, "epochs": 5, **after, "model": changed}
    _, records, module = fitted(tmp_path, resume=True, **job)
    assert any(new in note and "begin anew" in note for note in notes(records))
    wanted = made()
    wanted.load_state_dict(values, strict=False)
    x, y = data().tensors
    optimizer = after.get("optimizer", of("SGD"))(wanted.parameters())
    mean = [one.detach().clone() for one in wanted.parameters()]
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.mse_loss(wanted(x), y).backward()
        optimizer.step()
        mean = [(m + one.detach()) / 2 for m, one in zip(mean, wanted.parameters())]
    wanted = mean if "optim" in after else [one.detach() for one in wanted.parameters()]
    found = [one.detach() for one in module.parameters()]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def steady(value=1.0):
    found = nn.Sequential(*model(), nn.Linear(1, 1).double().requires_grad_(False))
    nn.init.constant_(found[3].weight, value)
    nn.init.constant_(found[3].bias, 0.0)
    return found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"optimizer": of("Adam")}, "own.optimizer was SGD, and is Adam"),
        slow_case({"batch_size": 16}, "train.batch_size was 8, and is 16"),
        slow_case({"train_data": of_lists(8)}, "the order of samples was 64 samples by seed 0"),
        slow_case({"model": lambda: steady(2.0)}, "frozen parameters or buffers had other values"),
        ({"train_data": data(scale=2)}, "had other data"),
    ],
)
def test_a_change_is_refused_by_its_name_and_taken_where_it_is_allowed(tmp_path, change, said):
    job = {"model": steady, "test_data": data(8)}
    _, _, whole = fitted(tmp_path / "whole", **job)
    fitted(tmp_path, steps=3, **job)
    with pytest.raises(CheckpointError, match=f"{said}.*--allow-changes"):
        fitted(tmp_path, resume=True, allow_changes=False, **job | change)
    _, records, module = fitted(tmp_path, resume=True, **job)
    assert notes(records) == []
    torch.testing.assert_close([*module.parameters()], [*whole.parameters()], rtol=0, atol=0)
    _, records, _ = fitted(tmp_path, resume=True, epochs=3, **job | change)
    assert said in notes(records)[0]


def test_keys_that_nothing_reads_make_no_other_job(tmp_path):
    """An earlier version took those of clients where there are none."""
    now = Config(run=Run(dir=str(tmp_path)), data=Data("digits"), train=Train(epochs=1, steps=2))
    then = replace(now, federated=Federated(split="dirichlet", alpha=0.1))
    with Communicator(MPI.COMM_SELF) as comm:
        with start(comm, then) as trainer:
            train(trainer)
        with start(comm, now) as trainer:
            assert resume(trainer.parts).step == 2
