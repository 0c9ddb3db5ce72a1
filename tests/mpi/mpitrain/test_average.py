"""The moving average of the parameters: one process's in every layout, in tests and exports."""

from contextlib import nullcontext
from itertools import islice

import numpy as np
import pytest

from mpitrain.checkpoint.export import find
from mpitrain.checkpoint.manifest import CheckpointError
from mpitrain.checkpoint.saving import resume
from mpitrain.config import ConfigError
from mpitrain.data import DataError
from mpitrain.start import start
from mpitrain.training.evaluation import averaged, evaluate
from tests.mpi.mpitrain.layouts import RANKS, changed, equal, few, job, keep, layouts, mlp, whole

pytestmark = pytest.mark.at_most(5)

KEPT = 0.6


def averaging(config, folder=None):
    return changed(config, average=KEPT, dir=folder or config.run.dir)


def trained(comm, config, steps=3):
    """(trained values, averages as the trainer has them, the same by hand, test); all by name."""
    with start(comm, config) as trainer:
        by_hand = whole(comm, trainer)
        for _ in islice(trainer.run_epoch(0), steps):
            for name, values in whole(comm, trainer).items():
                by_hand[name] += (1 - KEPT) * (values - by_hand[name])
        before = whole(comm, trainer)
        test = evaluate(trainer.parts, 0)
        equal(whole(comm, trainer), before)
        with averaged(trainer.parts):
            averages = whole(comm, trainer)
            comm.Barrier()
        trainer.parts.check_replicas("after the test")
        return before, averages, by_hand, test


@pytest.mark.parametrize(
    "layout", few("gpt", RANKS, ("sequence, zero 3", "v, zero bubble", "unequal 1-2-1"))
)
def test_averages_go_on_bit_by_bit_and_are_exported(comm, folder, layout):
    config = averaging(job("gpt", "float32", **layouts("gpt", RANKS)[layout]), folder)
    expected_values, expected, _, expected_test = trained(comm, config)
    with start(comm, config) as trainer:
        list(islice(trainer.run_epoch(0), 2))
        keep(trainer)
    with start(comm, config) as trainer:
        assert resume(trainer.parts).step == 2
        list(islice(trainer.run_epoch(0), 1))
        assert evaluate(trainer.parts, 0) == expected_test
        values = whole(comm, trainer)
        keep(trainer)
    comm.Barrier()
    checkpoint, _ = find(folder)
    equal(values, expected_values)
    equal({name: checkpoint.value(name) for name in expected}, expected)
    with pytest.raises(CheckpointError, match="has no parameters of nobody"):
        checkpoint.tensor("parameters", "nobody")


@pytest.mark.quick_on(2)
@pytest.mark.parametrize("kind", ["asynchronous", "offload", "16 bits"])
def test_of_other_ways_to_update(comm, folder, kind):
    """An asynchronous pipeline with one update a window, states in files, 16 bits."""
    window = {"schedule": kind, "window": 1, "pipe": RANKS if RANKS < 4 else 1}
    keys = {
        "asynchronous": {"dtype": "float64", "parallel": window},
        "offload": {"dtype": "float64", "zero": 1, "offload": str(folder / "states")},
        "16 bits": {"compute": "float16", "loss_scale": 8.0},
    }[kind]
    _, averages, by_hand, _ = trained(comm, averaging(changed(mlp(), **keys)))
    equal(averages, by_hand)


@pytest.mark.parametrize(("zero", "kind"), [(0, ConfigError), (1, DataError), (3, ConfigError)])
def test_a_test_that_fails_leaves_the_trained_values(comm, zero, kind):
    with start(comm, averaging(mlp(zero=zero))) as trainer:
        list(islice(trainer.run_epoch(0), 2))
        before = whole(comm, trainer)
        with pytest.raises(kind, match="bad sector"), averaged(trainer.parts):
            inside = whole(comm, trainer)
            assert not all(np.array_equal(inside[name], values) for name, values in before.items())
            raise kind("bad sector")
        equal(whole(comm, trainer), before)
        trainer.parts.check_replicas("after the test")


@pytest.mark.parametrize("zero", [0, 1])
def test_what_one_rank_alone_raises_in_a_test_keeps_nobody_waiting(comm, zero):
    """It has its own pieces again; where they are shards, the others have not seen that yet."""
    trainer = start(comm, averaging(mlp(zero=zero)))
    list(islice(trainer.run_epoch(0), 2))
    before = [piece.parameters.copy() for piece in trainer.parts.store.pieces]
    raises = comm.rank == 0 or zero == 1
    with pytest.raises(RuntimeError) if raises else nullcontext(), averaged(trainer.parts):
        assert not np.array_equal(before[0], trainer.parts.store.pieces[0].parameters)
        comm.Barrier()
        if raises:
            raise RuntimeError("of this rank")
    for piece, values in zip(trainer.parts.store.pieces, before, strict=True):
        np.testing.assert_array_equal(piece.parameters, values)
    trainer.close()
