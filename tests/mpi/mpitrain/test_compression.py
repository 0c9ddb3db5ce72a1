"""Training with gradients by codes: replicas stay equal, what codes leave out is not lost."""

from itertools import islice

import numpy as np
import pytest
from mpi4py import MPI
from msgspec.structs import replace

from mpitrain.checkpoint.saving import resume
from mpitrain.config import Compress, Optim
from mpitrain.metrics.records import Skipped
from mpitrain.start import start
from tests.cases import mostly_slow, slow_case
from tests.mpi.mpitrain.layouts import (
    RANKS,
    alone,
    assert_goes_on,
    changed,
    close,
    curve,
    in_folder,
    job,
    keep,
    layouts,
    mlp,
)

_QUICK = {1: "data", 4: "data x pipe"}.get(RANKS, "zero 1")
#: Layouts in which gradients can be coded.
DENSE = [name for name, how in layouts("gpt", RANKS).items() if how.get("zero", 0) < 2]
CODED = mostly_slow(DENSE, [_QUICK])


def coded(config, codec="bf16", feedback="on", **how):
    return replace(config, compress=Compress(codec, feedback, least=1, **how))


def residuals(trainer):
    """Values that codes left out on this rank, by name and element of the arena."""
    found = {}
    for kept in trainer.parts.summation.kept():
        flat = found.setdefault(kept.name, np.zeros(trainer.parts.arena.size))
        flat[kept.start : kept.start + kept.values.size] += kept.values
    return found


@pytest.mark.parametrize("layout", CODED)
def test_before_the_start_and_for_small_tensors_gradients_travel_as_they_are(comm, layout):
    config = job("gpt", **layouts("gpt", RANKS)[layout])
    expected, _ = curve(comm, config, steps=3)
    for how in (Compress("bf16", start=3), Compress("bf16", least=10**6)):
        found, _ = curve(comm, replace(config, compress=how), steps=3)
        np.testing.assert_allclose(found, expected, rtol=1e-12)


WHOLE = [(code, {}) for code in ("topk:keep=1", "powersgd:rank=4096,min_rate=0", "blocks:keep=1")]
WHOLE += [("topk:keep=1", {"sparse": "pruned_ring"})]


@pytest.mark.at_most(5)
@pytest.mark.parametrize(("codec", "how"), WHOLE)
@pytest.mark.parametrize("layout", [slow_case(p.values[0]) for p in CODED[1:]] + ["data"])
def test_codes_that_leave_nothing_out_train_as_dense_sums_do(comm, layout, codec, how):
    config = job("gpt", **layouts("gpt", RANKS)[layout])
    expected, _ = alone(config, steps=4)
    found, _ = curve(comm, coded(config, codec, "auto", **how), steps=4)
    np.testing.assert_allclose(found, expected, rtol=1e-7)


@pytest.mark.parametrize("layout", CODED)
def test_deep_gradient_compression_of_all_is_momentum_of_all(comm, layout):
    """Biases, and what tensor ranks have copies of, have it too."""
    config = job("gpt", **layouts("gpt", RANKS)[layout])
    config = replace(config, optim=Optim(lr=0.05, reference_batch=0, momentum=0.9))
    expected, _ = alone(config, steps=4)
    config = replace(config, optim=replace(config.optim, momentum=0.0))
    found, _ = curve(comm, coded(config, "dgc:keep=1,masking=false,momentum=0.9", "auto"), steps=4)
    # The norm of the sum is the velocity's there.
    np.testing.assert_allclose(found[:, 0], expected[:, 0], rtol=1e-9)


def test_the_clip_of_deep_gradient_compression_is_of_the_whole_model(comm):
    """Whatever its buckets are; and in one process it is that of the optimiser, but for the 1e-6
    that torch adds to a norm."""
    config = replace(mlp("float64"), optim=Optim(lr=0.05, momentum=0.0))
    clipped = replace(config, optim=replace(config.optim, clip_norm=0.4))
    codec = "dgc:keep=1,momentum=0,masking=false,clip=0.4"
    expected, weights = curve(MPI.COMM_SELF, clipped, steps=3)
    found, own = curve(MPI.COMM_SELF, coded(config, codec, "auto"), steps=3)
    assert expected[0, 1] > 0.4  # it is clipped
    np.testing.assert_allclose(found[:, 0], expected[:, 0], rtol=1e-6)
    close(own, weights, rtol=1e-5, atol=1e-7)
    several, _ = curve(comm, coded(config, codec, "auto"), steps=3)
    whole_bucket = replace(config.parallel, bucket_bytes=1 << 25)
    once, _ = curve(comm, coded(replace(config, parallel=whole_bucket), codec, "auto"), steps=3)
    np.testing.assert_allclose(several, once, rtol=1e-12)
    # Each rank's part is of length clip / sqrt(p) at most, so the sum's is sqrt(p) clip.
    assert 0 < several[:, 1].max() <= 0.4 * np.sqrt(RANKS) * (1 + 1e-12)


SCATTERED = {"zero 2": {"zero": 2}, "zero 3": {"zero": 3}}
if RANKS % 2 == 0:
    SCATTERED["data x pipe, zero 2"] = {"zero": 2, "pipe": 2}
    SCATTERED["tensor, zero 3"] = {"zero": 3, "tensor": 2}
SHARDS = mostly_slow(SCATTERED, ["data x pipe, zero 2"])


@pytest.mark.parametrize("layout", SHARDS)
def test_shards_of_gradients_are_summed_by_codes(comm, layout):
    """By one that rounds to float32, as dense sums but for that; start and least, too."""
    config = job("gpt", **SCATTERED[layout])
    expected, _ = curve(comm, config, steps=4)
    found, _ = curve(comm, coded(config, "atomo:rank=4096", "auto"), steps=4)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert RANKS == 1 or not np.array_equal(found, expected)
    later, _ = curve(comm, coded(config, "terngrad", "auto", start=2), steps=4)
    np.testing.assert_allclose(later[:2], expected[:2], rtol=1e-12)
    assert not np.allclose(later[2:, 1], expected[2:, 1], rtol=1e-3)


WHOLE_MOMENTUM = "dgc:keep=0.2"
#: Model, layout, code and its feedback; momentum of what is not coded is all of it in a checkpoint,
#: also of tensors on several stages and of tables of which each rank has other rows.
INTERRUPTED = [
    ("gpt", {"pipe": 2 if RANKS % 2 == 0 else RANKS}, WHOLE_MOMENTUM, "auto"),
    ("recommender", {}, WHOLE_MOMENTUM, "auto"),
    *(
        pytest.param("gpt", layouts("gpt", RANKS)[p.values[0]], *code, marks=marks)
        for p in CODED
        for code, marks in (
            (("bf16", "on"), p.marks),
            ((WHOLE_MOMENTUM, "auto"), [pytest.mark.slow, pytest.mark.at_most(5)]),
        )
    ),
    *(
        pytest.param("gpt", SCATTERED[p.values[0]], "int8:rounding=stochastic,block=32", "auto",
                     marks=p.marks)
        for p in SHARDS
    ),
]  # fmt: skip


@pytest.mark.parametrize(("model", "layout", "code", "feedback"), INTERRUPTED)
def test_a_run_that_was_interrupted_goes_on_bit_by_bit(comm, folder, model, layout, code, feedback):
    config = job(model, "float32", **layout)
    if code == WHOLE_MOMENTUM:
        config = replace(config, optim=Optim(lr=0.02, momentum=0.0))
    assert_goes_on(comm, in_folder(coded(config, code, feedback), folder), residuals)


def test_on_another_number_of_replicas_the_sum_of_what_was_left_out_stays(comm, folder):
    """From all ranks to one, to the ranks but the last one, and back to all."""
    config, sums = coded(in_folder(job("mlp", batch_size=24, micro_batches=1), folder)), []
    fewer = comm.Split(0 if comm.rank < max(1, RANKS - 1) else MPI.UNDEFINED)

    def total(group, trainer):
        return sum(group.allreduce(values) for values in residuals(trainer).values())

    for group in (comm, MPI.COMM_SELF if comm.rank == 0 else MPI.COMM_NULL, fewer, comm):
        if group != MPI.COMM_NULL:
            with start(group, config) as trainer:
                resume(trainer.parts, allow_changes=True)
                sums.append(total(group, trainer))
                list(islice(trainer.run_epoch(0), 2))
                sums.append(total(group, trainer))
                keep(trainer)
        comm.Barrier()
    if fewer != MPI.COMM_NULL:
        fewer.Free()
    if comm.rank == 0:
        for before, after in ((1, 2), (3, 4), (5, 6)):
            np.testing.assert_allclose(sums[after], sums[before], rtol=1e-12, atol=1e-18)
            assert np.abs(sums[before]).max() > 0


def test_a_skipped_step_leaves_out_nothing_and_others_little(comm):
    """A loss scale that is far too large: nothing is committed until gradients are finite."""
    config = changed(coded(mlp()), compute="float16", loss_scale=2.0**24)
    with start(comm, config) as trainer:
        skipped, records = [], trainer.run_epoch(0)
        while isinstance(one := next(records), Skipped):
            skipped.append(one.loss_scale)
            assert not residuals(trainer)["residual"].any()
        assert skipped[:3] == [2.0**23, 2.0**22, 2.0**21]
        for _ in range(3):
            trainer.parts.check_replicas("after a step")
            left = residuals(trainer)["residual"]
            # In units of the gradients, not of the loss scale.
            largest = np.abs(trainer.parts.store.gradients).max()
            assert 0 < np.abs(left).max() < 2**-7 * max(1.0, 4 * largest)
            next(records)
