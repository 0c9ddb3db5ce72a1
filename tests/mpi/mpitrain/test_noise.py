"""The noise scale of a quadratic whose noise is known, and its numbers in other layouts."""

import numpy as np
import pytest
from mpi4py import MPI

import mpitrain
from mpitrain.config import Config, ConfigError
from mpitrain.config.reading import converted
from mpitrain.metrics.reader import read_records
from mpitrain.metrics.records import Step
from tests.cases import slow_case

SIZE = MPI.COMM_WORLD.size


@pytest.fixture(scope="module")
def labels(comm, tmp_path_factory):
    """Points y of a plane, drawn about (1, 1), and their file: the loss is the mean of (w - y)^2,
    as inputs are 0 and w is the bias."""
    y = np.random.default_rng(3).normal(1.0, 1.0, (2048, 2))
    path = comm.bcast(tmp_path_factory.mktemp("noise") / "y.npz" if comm.rank == 0 else None)
    if comm.rank == 0:
        np.savez(path, inputs=np.zeros((2048, 2)), labels=y)
    comm.Barrier()
    return y, path


def made(comm, path, **tables):
    usual = {
        "run": {"dtype": "float64", "noise_scale": True, "seed": 5},
        "data": {"name": "arrays", "path": str(path), "test_fraction": 0.001},
        "model": {"kind": "mlp", "hidden": [2]},
        "loss": {"name": "mean_squared_error"},
        "optim": {"lr": 1e-12, "momentum": 0.0},
    }
    return mpitrain.Trainer(comm, converted(usual | tables, Config))


def noise(comm, path, micro_batches, epochs=1, **parallel):
    """The records of noise, at nearly constant weights 0."""
    train = {"batch_size": 16, "micro_batches": micro_batches, "epochs": epochs}
    with made(comm, path, train=train, parallel=parallel) as trainer:
        told = [one for epoch in range(epochs) for one in trainer.run_epoch(epoch)]
    return [step.noise for step in told if isinstance(step, Step)]


def test_estimates_are_right_in_the_mean(comm, labels):
    """Over 512 steps, the mean of the estimates strays by some 2%; the seed is fixed."""
    y, path = labels
    found = noise(comm, path, 4, epochs=4)
    square, variance = np.sum(y.mean(axis=0) ** 2), y.var(axis=0).sum()
    assert np.mean([one.gradient_square for one in found]) == pytest.approx(square, rel=0.06)
    assert np.mean([one.variance for one in found]) == pytest.approx(variance, rel=0.06)
    assert found[-1].noise_scale == pytest.approx(variance / square, rel=0.2)


@pytest.mark.parametrize(
    "keys", [{}, *(slow_case({"zero": n}) for n in (1, 2)), {"zero": 3}, {"pipe": 2}], ids=str
)
@pytest.mark.skipif(SIZE not in (2, 4), reason="layouts of 2 or 4 ranks")
def test_other_layouts_have_the_same_numbers(comm, labels, keys):
    alone = noise(MPI.COMM_SELF, labels[1], 8)
    found = noise(comm, labels[1], 8 * keys.get("pipe", 1) // SIZE, **keys)
    for one, other in zip(found, alone, strict=True):
        assert one.gradient_square == pytest.approx(other.gradient_square, rel=1e-9)
        assert one.variance == pytest.approx(other.variance, rel=1e-9)


def test_a_tied_tensor_has_the_square_of_the_sum_of_its_parts(comm, tmp_path_factory):
    """Two micro-batches of a step are two steps of half the batch, at nearly constant weights."""
    path = tmp_path_factory.mktemp("tied")
    (path / "text.txt").write_text("".join(chr(97 + i * i % 13) for i in range(300)))
    tables = {
        "data": {"name": "text", "path": str(path / "text.txt"), "context": 8},
        "model": {"kind": "gpt", "layers": 1, "heads": 1, "width": 4},
        "loss": {},
    }

    def steps(micro_batches):
        tables["train"] = {"batch_size": 4 * micro_batches, "micro_batches": micro_batches}
        tables["run"] = {"dtype": "float64", "noise_scale": micro_batches > 1}
        with made(MPI.COMM_SELF, path, **tables) as trainer:
            return [one for one in trainer.run_epoch(0) if isinstance(one, Step)]

    apart = [step.grad_norm**2 / 4 for step in steps(1)]
    for step, one, other in zip(steps(2)[:-1], apart[::2], apart[1::2]):
        square = 2 * (step.grad_norm**2 - one - other)
        assert step.noise.gradient_square == pytest.approx(square, rel=1e-6)


def test_a_resumed_run_goes_on_with_the_averages(comm, folder, labels):
    run = {"dtype": "float64", "noise_scale": True, "dir": str(folder)}

    def fitted(steps=8, resume=False):
        train = {"batch_size": 16, "micro_batches": 2, "steps": steps}
        with made(comm, labels[1], run=run, optim={}, train=train) as trainer:
            trainer.fit(resume=resume)
        return [one.noise for one in read_records(folder / "metrics.jsonl").of(Step)]

    expected = fitted()
    fitted(steps=3)
    assert fitted(resume=True) == expected


def test_one_micro_batch_is_refused(labels):
    with pytest.raises(ConfigError, match=r"run.noise_scale .* train.micro_batches = 2"):
        noise(MPI.COMM_SELF, labels[1], 1)
