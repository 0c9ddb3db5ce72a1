"""The trainer on all ranks: replicas, errors that all of them share, threads."""

import os
import re
from itertools import islice
from multiprocessing import active_children

import numpy as np
import pytest
from msgspec.structs import replace
from threadpoolctl import threadpool_info, threadpool_limits

from collectives import CollectiveError, Communicator, CorruptMessage
from mpitrain.config import ConfigError
from mpitrain.data import DataError
from mpitrain.metrics.records import Skipped
from mpitrain.models import SequentialModel
from mpitrain.parallel.replicas import ReplicaMismatch
from mpitrain.pipeline.profiles import measure, write_profile
from mpitrain.ranks.threads import limit_blas_threads
from mpitrain.ranks.together import together
from mpitrain.run import train
from mpitrain.start import start
from mpitrain.update.agreement import NonFinite
from tests.mpi.mpitrain.layouts import RANKS, changed, in_folder, mlp, text_job


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("epochs", "when"), [(0, "before the first step"), (1, "after epoch 1: rank {} against")]
)
def test_a_replica_that_diverges_is_caught_on_all_ranks(comm, folder, epochs, when):
    with start(comm, in_folder(mlp(), folder)) as trainer:
        for epoch in range(epochs):
            list(trainer.run_epoch(epoch))
        if comm.rank == comm.size - 1:
            flat = trainer.parts.store.parameters
            flat[7] = np.nextafter(flat[7], np.float32(np.inf))
        with pytest.raises(ReplicaMismatch, match=when.format(comm.size - 1)):
            list(trainer.run_epoch(1)) if epochs else train(trainer)


@pytest.mark.mpi(min_size=2)
def test_ranks_may_have_their_files_in_other_places(comm, tmp_path):
    """And read ahead by other numbers of processes, or have the optimiser's state in memory."""
    config, last = mlp(), comm.rank == RANKS - 1
    with start(comm, config) as trainer:
        list(trainer.run_epoch(0))
        expected = trainer.parts.store.parameters.copy()
    offload = "" if last else str(tmp_path)
    own = in_folder(config, tmp_path / str(comm.rank) / "run", workers=2 * last, offload=offload)
    with start(comm, own) as trainer:
        list(trainer.run_epoch(0))
        np.testing.assert_array_equal(trainer.parts.store.parameters, expected)


@pytest.mark.skipif(RANKS % 2, reason="needs two stages")
@pytest.mark.parametrize("there", [True, False])
def test_each_rank_reads_a_profile_of_its_own(comm, tmp_path, there):
    """Another cut, or a file that one rank alone lacks, is an error of all."""
    profile, path = measure(mlp(), repeats=1), tmp_path / "profile.json"
    slowest = -1 if comm.rank == RANKS - 1 else 0
    profile[slowest] = replace(profile[slowest], forward_s=1e3)
    if there or comm.rank < RANKS - 1:
        write_profile(path, profile)
    match = "jobs: the partition by" if there else rf"cannot be read.*rank {RANKS - 1} of {RANKS}"
    with pytest.raises(ConfigError, match=match):
        start(comm, mlp(pipe=2, partition="auto", profile=str(path)))


class Two(RuntimeError):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def local(text):
    class Local(RuntimeError):
        pass

    return Local(text)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (local, RuntimeError, "Local: so it is"),
        (lambda text: Two("so it", "is"), RuntimeError, "Two: so it and is"),
        (CorruptMessage, CorruptMessage, "so it is"),
        (CollectiveError, CollectiveError, "so it is"),
    ],
)
def test_what_one_rank_raises_all_raise_whatever_its_class(comm, error, kind, text):
    last = comm.rank == RANKS - 1

    def fails():
        if last:
            raise error("so it is")

    with pytest.raises(kind) as caught:
        together(comm, fails, CollectiveError, RuntimeError)
    assert str(caught.value).startswith(f"{text} (rank {RANKS - 1} of {RANKS}, on ")
    assert (caught.value.__cause__ is not None) == last
    assert type(caught.value) is kind


@pytest.mark.parametrize("layout", [{}, {"sync": {"kind": "local", "period": 2}}])
def test_steps_that_read_what_may_fail_exchange_no_pickles(comm, monkeypatch, layout):
    met = []
    with start(comm, changed(mlp(), data={"workers": 1}, **layout)) as trainer:
        epoch = trainer.run_epoch(0)
        next(epoch)
        for name in ("allgather", "allreduce", "bcast", "gather"):
            monkeypatch.setattr(Communicator, name, lambda *args, name=name: met.append(name))
        assert [record.step for record in islice(epoch, 4)] == [2, 3, 4, 5]
    assert not met


def test_a_job_that_is_refused_leaves_nothing_behind(comm, monkeypatch, split_off):
    """Communicators are gone, and processes that read ahead; those of one that is closed, too."""
    config = changed(mlp(), workers=1)
    with pytest.raises(ConfigError, match="nonsense"):
        start(comm, changed(config, best="nonsense"))
    assert not split_off and not active_children()

    def last(parts):
        assert split_off and active_children()
        raise ConfigError("at the end")

    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="at the end"):
        patch.setattr("mpitrain.start.SynchronousLoop", last)
        start(comm, config)
    assert not split_off and not active_children()
    with start(comm, config) as trainer:
        assert split_off
    trainer.close()
    assert not split_off and not active_children()


def spoil(trainer):
    """The inputs of the last rank are not numbers."""
    if trainer.parts.comm.rank == RANKS - 1:
        trainer.parts.data.train.inputs[...] = np.nan


def unfit(before=""):
    """Pattern of what is said of it."""
    which = r"the inputs of sample \d+ to train on hold nan \(float32\)"
    return rf"{before}.*rank {RANKS - 1}: {which}"


def test_all_ranks_agree_that_the_loss_is_not_finite(comm):
    with start(comm, mlp()) as trainer:
        before = trainer.parts.store.parameters.copy()
        spoil(trainer)
        with pytest.raises(NonFinite, match=unfit(r"the loss or .* at step 1 \(")) as raised:
            list(trainer.run_epoch(0))
        assert "put these data right" in str(raised.value) and "smaller" not in str(raised.value)
        np.testing.assert_array_equal(trainer.parts.store.parameters, before)


def test_samples_that_are_not_finite_are_named_when_no_loss_scale_is_left(comm):
    """Before that, the loss may leave them out, and a gradient have overflowed by the scale."""
    with start(comm, changed(mlp(), compute="float16", loss_scale=2.0)) as trainer:
        trainer.parts.data.train.inputs[...] = 1e6  # more than float16 holds
        steps = trainer.run_epoch(0)
        assert isinstance(next(steps), Skipped) and trainer.parts.scale.value == 1
        with pytest.raises(NonFinite, match=r"step 2 \(rank 0: the inputs .* hold inf \(float16"):
            next(steps)


def test_all_ranks_skip_together_where_the_job_says_so(comm):
    with start(comm, changed(mlp(), on_nonfinite="skip")) as trainer:
        before = trainer.parts.store.parameters.copy()
        spoil(trainer)
        records = list(islice(trainer.run_epoch(0), 3))
        assert [type(record) for record in records] == [Skipped] * 3
        assert all(re.match(unfit(), record.culprits) for record in records)
        assert (trainer.parts.steps_done, trainer.parts.updater.steps) == (3, 0)
        np.testing.assert_array_equal(trainer.parts.store.parameters, before)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("other", ["longer", "another", "missing"])
def test_ranks_with_other_data_are_told_at_once(comm, folder, other):
    """The last rank's node has an older copy."""
    path, same = folder / f"rank{comm.rank}", "the same on all nodes "
    others = {"longer": same * 41, "another": "the same on old nodes " * 40}
    is_last = comm.rank == RANKS - 1
    path.write_text(others.get(other, "") if is_last else same * 40)
    if is_last and other == "missing":
        path.unlink()
    told = rf"cannot be read.*rank {RANKS - 1} of" if other == "missing" else "different data: rank"
    with pytest.raises(DataError, match=told):
        start(comm, text_job(path))


def test_a_model_that_is_too_large_is_refused_on_all_ranks(comm, monkeypatch):
    def drawn(self, *arguments):
        raise MemoryError("Unable to allocate 954. GiB")

    if comm.rank == RANKS - 1:
        monkeypatch.setattr(SequentialModel, "drawn", drawn)
    with pytest.raises(ConfigError, match=r"model: the parameters .*954\. GiB.*make the model"):
        start(comm, mlp())


def test_blas_threads_share_a_node_and_stay_below_what_was_asked_for(comm):
    def most():
        return max([1, *(p["num_threads"] for p in threadpool_info() if p["user_api"] == "blas")])

    cores = len(os.sched_getaffinity(0))
    for given, share in ((2 * cores, max(1, cores // comm.size)), (1, 1)):
        with threadpool_limits(given, user_api="blas"), limit_blas_threads(comm):
            assert most() == share
