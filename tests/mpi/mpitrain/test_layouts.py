"""Every layout of ranks against the same training in one process."""

from collections import Counter
from random import Random

import numpy as np
import pytest
from mpi4py import MPI
from msgspec.structs import replace

from mpitrain import callbacks
from mpitrain.config import ConfigError, Loss
from mpitrain.device import Device
from mpitrain.group import TensorGroup
from mpitrain.objective.metrics import F1
from mpitrain.start import start
from mpitrain.training.evaluation import evaluate
from tests.cases import mostly_slow, slow_case
from tests.drawn_layouts import MOST, run
from tests.mpi.mpitrain.layouts import RANKS, alone, changed, close, curve, few, job, layouts

FIRST, NOT_DRAWN = ("gpt", "convnet"), ("mlp", "recommender")
# Quick are one model in every other layout of 2 ranks, and in all of 4; and two on 3.
QUICK = {2: ("gpt",), 3: FIRST, 4: ("gpt",)}.get(RANKS, ())
FEW = few("gpt", RANKS)
#: Drawn layouts, and how many are quick.
DRAWN, FIRST_DRAWN = 40, {2: 6, 3: 6, 4: 8}.get(RANKS, 0)


def same(found, expected, rtol):
    curve, parameters = found
    expected_curve, expected_parameters = expected
    np.testing.assert_allclose(curve, expected_curve, rtol=rtol)
    close(parameters, expected_parameters, rtol=0, atol=rtol)


@pytest.mark.parametrize(
    ("model", "layout"),
    mostly_slow(
        [(model, name) for model in FIRST for name in layouts(model, RANKS)],
        [(m, name) for m in QUICK for name in [*layouts(m, RANKS)][:: 1 + (RANKS < 3)]],
    ),
)
def test_losses_are_those_of_one_process(comm, model, layout):
    config = job(model, **layouts(model, RANKS)[layout])
    same(curve(comm, config, 3), alone(config, 3), 1e-10)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("number", mostly_slow(range(DRAWN), range(FIRST_DRAWN)))
def test_drawn_layouts_are_those_of_one_process_go_on_and_move(comm, folder, number):
    said = []
    try:
        worst = run(comm, Random(f"1 {number} {comm.size}"), folder, said.append, Counter())
    except ConfigError as error:
        pytest.skip(f"{''.join(said)} is refused: {error}")
    assert worst <= MOST, "".join(said)


@pytest.mark.parametrize("layout", FEW)
def test_labels_that_are_left_out(comm, layout):
    """A character is; also where ranks share the columns of its scores."""
    config = replace(job("gpt", **layouts("gpt", RANKS)[layout]), loss=Loss(ignore_index=5))
    same(curve(comm, config, 3), alone(config, 3), 1e-10)


@pytest.mark.at_most(5)
@pytest.mark.parametrize(
    ("model", "layout"),
    [pytest.param(m, *p.values, marks=p.marks) for m in NOT_DRAWN for p in few(m, RANKS)],
)
def test_models_that_are_not_drawn(comm, model, layout):
    config = job(model, **layouts(model, RANKS)[layout])
    same(curve(comm, config, steps=5), alone(config, 5), 1e-9)


#: Columns that stages between them, or ranks, share unequally, so that some ranks have none.
UNEQUAL = [({"tensor": RANKS}, {"channels": (1, 2), "hidden": (1, 2)})]
if RANKS == 4:
    UNEQUAL += [({"pipe": 2, "tensor": 2, "partition": (3, 2)}, {"hidden": (9, 7)})]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("parallel", "shape"), UNEQUAL)
def test_columns_and_stages_between_them_that_ranks_share_unequally(comm, parallel, shape):
    config = changed(job("convnet", **parallel), **shape)
    same(curve(comm, config, 3), alone(config, 3), 1e-10)


@pytest.mark.parametrize("layout", FEW)
def test_the_test_is_the_same_on_every_layout(comm, layout):
    def tested(ranks, **parallel):
        measured = {"metrics": ("accuracy", "top3", "f1", "perplexity")}
        config = changed(job("gpt", batch_size=50, **parallel), smoothing=0.1, evaluate=measured)
        with start(ranks, config) as trainer:
            return evaluate(trainer.parts, 0)

    found = tested(comm, **layouts("gpt", RANKS)[layout])
    expected = tested(MPI.COMM_SELF)
    assert found.test_loss == pytest.approx(expected.test_loss, rel=1e-12)
    inexact, exact = found.metrics.pop("perplexity"), expected.metrics.pop("perplexity")
    assert inexact == pytest.approx(exact, rel=1e-12)
    assert found.metrics == expected.metrics and 0 < found.metrics["accuracy"] < 1


def test_f1_where_a_rank_has_no_columns(comm):
    classes = max(1, RANKS - 1)
    rng = np.random.default_rng(0)
    scores, labels = rng.normal(size=(20, classes)), rng.integers(classes, size=20)
    group = TensorGroup(comm)
    found = F1(group, classes).add(scores[:, group.share(classes)], labels)
    np.testing.assert_array_equal(found, F1(TensorGroup(), classes).add(scores, labels))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_state_is_sharded(comm, zero):
    with start(comm, job("gpt", zero=zero)) as trainer:
        own = sum(piece.gradients.size for piece in trainer.parts.store.pieces)
        most = trainer.parts.arena.size / RANKS + len(trainer.parts.store.pieces)
        assert own <= most
        state = sum(array.size for slots in trainer.parts.updater.state for array in slots.values())
        assert state == 2 * own
        assert comm.allreduce(own) == trainer.parts.arena.size
        if zero == 3:
            assert sum(piece.parameters.size for piece in trainer.parts.store.pieces) == own
            assert not trainer.parts.store._whole


@pytest.mark.at_most(5)
@pytest.mark.parametrize("compute", ["bfloat16", slow_case("float16")])
@pytest.mark.parametrize("layout", FEW)
def test_sixteen_bits_train_nearly_as_well(comm, compute, layout):
    config = job("gpt", "float32", **layouts("gpt", RANKS)[layout])
    found, _ = curve(comm, changed(config, compute=compute), steps=4)
    np.testing.assert_allclose(found[:, 0], alone(config, 5)[0][:4, 0], rtol=5e-3)


def test_the_peak_is_measured_in_the_type_of_activations(comm, monkeypatch):
    kinds = []
    monkeypatch.setattr(Device, "peak", lambda _, comm, kind: kinds.append(np.dtype(kind).name))
    with start(comm, changed(job("gpt", "float32"), compute="bfloat16", mfu=True)) as trainer:
        callbacks._start(trainer.parts)
    assert kinds == ["bfloat16"]


@pytest.mark.mpi(min_size=2)
def test_a_partition_of_more_layers_than_there_are_is_refused(comm):
    with pytest.raises(ConfigError, match="layers, and the model has"):
        start(comm, job("gpt", pipe=RANKS, partition=(100,) * RANKS))
