"""The trainer on all ranks: replicas, errors that all share, checkpoints."""

import os
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI
from msgspec.structs import replace
from threadpoolctl import threadpool_info, threadpool_limits

from collectives import Communicator
from collectives.algorithms import ALGORITHMS, names
from mpitrain import nn
from mpitrain import trace as trace_module
from mpitrain.arena import DATA, Arena
from mpitrain.build import mapped
from mpitrain.checkpoint import Checkpoint, CheckpointError, Writer
from mpitrain.config import Checkpoint as CheckpointTable
from mpitrain.config import ConfigError
from mpitrain.data import DataError
from mpitrain.metrics import Skipped
from mpitrain.models import Model
from mpitrain.parallel.replicas import ReplicaMismatch
from mpitrain.parallel.replicated import Replicated
from mpitrain.parallel.store import Reduction
from mpitrain.parallel.summation import Dense
from mpitrain.run import checkpoints, resume, save, train
from mpitrain.stop import StopFlag, Stopped
from mpitrain.threads import limit_blas_threads
from mpitrain.trace import Trace, read_trace
from mpitrain.trainer import Trainer
from mpitrain.update import NonFinite
from tests.mpi.layouts import curve, job, layouts, whole

pytestmark = pytest.mark.mpi

EVERY_ALLREDUCE = ["native", *names("allreduce")]
RANKS = MPI.COMM_WORLD.size
# What does not depend on how many ranks there are is tried on few: the others take long enough.
FEW = layouts("gpt", RANKS) if RANKS in (2, 4) else ["data", "pipe, 1f1b", "zero 3"]


@pytest.fixture(scope="module")
def comm():
    with Communicator(MPI.COMM_WORLD) as world, limit_blas_threads(world):
        yield world


@pytest.fixture
def folder(comm, tmp_path):
    """One folder for all ranks."""
    return Path(comm.bcast(str(tmp_path)))


def mlp(dtype="float32", **parallel):
    return job("mlp", dtype, batch_size=100, micro_batches=1, **parallel)


@pytest.mark.parametrize("algorithm", EVERY_ALLREDUCE)
def test_replicas_are_bitwise_equal_after_an_epoch(comm, algorithm):
    with Trainer(comm, mlp(algorithm=algorithm)) as trainer:
        before = trainer.store.parameters.copy()
        list(trainer.run_epoch(0))
        assert (trainer.store.parameters != before).any()
        replicas = comm.allgather(trainer.store.parameters.tobytes())
        assert len(set(replicas)) == 1


@pytest.mark.parametrize("algorithm", names("allreduce"))
def test_overlap_changes_no_bit(comm, algorithm):
    (_, overlapped), (_, at_the_end) = (
        curve(comm, mlp(algorithm=algorithm, overlap=overlap), steps=5) for overlap in (True, False)
    )
    for name, values in overlapped.items():
        np.testing.assert_array_equal(values, at_the_end[name])


# Algorithms that cut a buffer into chunks reduce each in another order of the ranks, so that the
# order for an element depends on where its bucket begins.  Those of one chunk cannot tell.
@pytest.mark.parametrize(
    "algorithm",
    [a.name for a in ALGORITHMS if a.collective == "allreduce" and a.schedule(64).chunks == 1],
)
def test_bucket_size_changes_no_bit_where_order_ignores_it(comm, algorithm):
    results = []
    for size in (1, 1000, 2**20):
        config = mlp(algorithm=algorithm)
        config = replace(config, parallel=replace(config.parallel, bucket_bytes=size))
        results.append(curve(comm, config, steps=5)[1])
    for other in results[1:]:
        for name, values in results[0].items():
            np.testing.assert_array_equal(values, other[name])


@pytest.mark.mpi(min_size=2)
def test_a_replica_that_diverges_is_caught_on_all_ranks(comm):
    trainer = Trainer(comm, mlp())
    list(trainer.run_epoch(0))
    if comm.rank == comm.size - 1:
        flat = trainer.store.parameters
        flat[7] = np.nextafter(flat[7], np.float32(np.inf))
    with pytest.raises(ReplicaMismatch, match=rf"after epoch 1: rank {comm.size - 1} against"):
        list(trainer.run_epoch(1))
    trainer.close()


@pytest.mark.mpi(min_size=2)
def test_initial_values_that_differ_are_caught_before_the_first_step(comm, folder):
    config = mlp()
    own = replace(config.run, seed=comm.rank, dir=str(folder))
    trainer = Trainer(comm, replace(config, run=own))
    with pytest.raises(ReplicaMismatch, match="before the first step"):
        train(trainer)
    assert trainer.steps_done == 0
    trainer.close()


def spoil(trainer):
    """A weight of the last rank of all is not a number, in one tensor."""
    if trainer.comm.rank == RANKS - 1:
        trainer.data.train.inputs[...] = np.nan


def test_all_ranks_agree_that_the_loss_is_not_finite(comm):
    with Trainer(comm, mlp()) as trainer:
        before = trainer.store.parameters.copy()
        spoil(trainer)
        with pytest.raises(NonFinite, match=rf"at step 1 \(.*rank {RANKS - 1}: the loss"):
            list(trainer.run_epoch(0))
        np.testing.assert_array_equal(trainer.store.parameters, before)


def test_all_ranks_skip_together_where_the_job_says_so(comm):
    config = mlp()
    config = replace(config, run=replace(config.run, on_nonfinite="skip"))
    with Trainer(comm, config) as trainer:
        before = trainer.store.parameters.copy()
        spoil(trainer)
        records = list(islice(trainer.run_epoch(0), 3))
        assert [type(record) for record in records] == [Skipped] * 3
        assert (trainer.steps_done, trainer.updater.steps) == (3, 0)
        np.testing.assert_array_equal(trainer.store.parameters, before)


def test_the_loss_scale_falls_when_a_gradient_overflows_and_rises_again(comm):
    config = mlp()
    run = replace(config.run, compute="float16", loss_scale=2.0**40, loss_scale_window=4)
    with Trainer(comm, replace(config, run=run)) as trainer:
        records = list(trainer.run_epoch(0)) + list(trainer.run_epoch(1))
        skipped = [isinstance(record, Skipped) for record in records]
        assert skipped[0] and not all(skipped)
        scales = [record.loss_scale for record in records if isinstance(record, Skipped)]
        assert scales[:3] == [2.0**39, 2.0**38, 2.0**37]
        assert trainer.updater.steps == skipped.count(False)


@pytest.mark.parametrize("layout", FEW)
def test_a_run_that_was_interrupted_goes_on_bit_by_bit(comm, folder, layout):
    config = job("gpt", "float32", **layouts("gpt", RANKS)[layout])
    config = replace(config, run=replace(config.run, dir=str(folder)))
    expected_curve, expected = curve(comm, config, steps=6)
    with Trainer(comm, config) as trainer:
        list(islice(trainer.run_epoch(0), 3))
        writer = Writer(comm, checkpoints(trainer.config), keep=2)
        save(trainer, writer)
        list(islice(trainer.run_epoch(0), 2))  # after the snapshot, while it is being written
        writer.finish()
    with Trainer(comm, config) as trainer:
        resumed = resume(trainer)
        assert (resumed.step, resumed.refused) == (3, [])
        records = list(islice(trainer.run_epoch(0), 3))
        found = [(record.loss, record.grad_norm) for record in records]
        np.testing.assert_array_equal(found, expected_curve[3:])
        for name, values in whole(comm, trainer).items():
            np.testing.assert_array_equal(values, expected[name])


@pytest.mark.parametrize("layout", FEW)
def test_a_run_goes_on_in_another_layout(comm, folder, layout):
    config = job("gpt", **layouts("gpt", RANKS)[layout])
    config = replace(config, run=replace(config.run, dir=str(folder)))
    plain = replace(job("gpt", micro_batches=1), run=config.run)
    with Communicator(MPI.COMM_SELF) as one:
        expected, _ = curve(one, plain, steps=6)
        if comm.rank == 0:
            with Trainer(one, plain) as trainer:
                list(islice(trainer.run_epoch(0), 2))
                writer = Writer(one, checkpoints(trainer.config), keep=9, background=False)
                save(trainer, writer)
    comm.Barrier()
    with Trainer(comm, config) as trainer:
        assert resume(trainer).step == 2
        records = list(islice(trainer.run_epoch(0), 2))
        writer = Writer(comm, checkpoints(trainer.config), keep=9, background=False)
        save(trainer, writer)
    with Communicator(MPI.COMM_SELF) as one, Trainer(one, plain) as trainer:
        assert resume(trainer).step == 4
        records += list(islice(trainer.run_epoch(0), 2))
    np.testing.assert_allclose([r.loss for r in records], expected[2:, 0], rtol=1e-10)


def saved(comm, folder, steps=(1, 2, 3)):
    """A run in ``folder`` with checkpoints after these steps; its job."""
    config = mlp()
    config = replace(config, run=replace(config.run, dir=str(folder)))
    with Trainer(comm, config) as trainer:
        writer = Writer(comm, checkpoints(trainer.config), keep=len(steps), background=False)
        for step, _ in enumerate(trainer.run_epoch(0), 1):
            if step in steps:
                save(trainer, writer)
            if step == max(steps):
                break
    return config


def spoil_newest(folder, how):
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    file = newest / f"rank-{RANKS - 1:05d}.safetensors"
    data = file.read_bytes()
    match how:
        case "truncated":
            file.write_bytes(data[: len(data) // 2])
        case "empty":
            file.write_bytes(b"")
        case "one bit":
            file.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        case "missing":
            file.unlink()
        case "of another step":
            file.write_bytes((newest.with_name("step-00000002") / file.name).read_bytes())
        case "manifest cut off":
            manifest = newest / "manifest.json"
            manifest.write_bytes(manifest.read_bytes()[:-20])
        case "no manifest":
            (newest / "manifest.json").unlink()


SPOILT = [
    "truncated",
    "empty",
    "one bit",
    "missing",
    "of another step",
    "manifest cut off",
    "no manifest",
]


@pytest.mark.parametrize("how", SPOILT)
def test_a_spoilt_checkpoint_is_refused_and_the_one_before_used(comm, folder, how):
    config = saved(comm, folder)
    if comm.rank == 0:
        spoil_newest(folder, how)
    comm.Barrier()
    with Trainer(comm, config) as trainer:
        resumed = resume(trainer)
        assert resumed.step == 2
        assert len(resumed.refused) == 1
        assert "step-00000003" in resumed.refused[0]


def test_what_was_not_completed_is_no_checkpoint(comm, folder):
    config = saved(comm, folder, steps=(1,))
    if comm.rank == 0:
        unfinished = folder / "checkpoints" / ".step-00000009.unfinished"
        unfinished.mkdir()
        (unfinished / "rank-00000.safetensors").write_bytes(b"half of it")
    comm.Barrier()
    with Trainer(comm, config) as trainer:
        assert resume(trainer).step == 1


def test_when_all_are_spoilt_nothing_is_made_up(comm, folder):
    config = saved(comm, folder, steps=(1,))
    if comm.rank == 0:
        spoil_newest(folder, "one bit")
    comm.Barrier()
    with Trainer(comm, config) as trainer, pytest.raises(CheckpointError, match="digest differs"):
        resume(trainer)


def test_another_jobs_checkpoint_is_refused(comm, folder):
    config = saved(comm, folder, steps=(1,))
    other = replace(config, train=replace(config.train, batch_size=50))
    with (
        Trainer(comm, other) as trainer,
        pytest.raises(CheckpointError, match=r"train\.batch_size was 100, and is 50"),
    ):
        resume(trainer)


def text_job(path, **run):
    """Of a text that each rank may have under another name."""
    config = job("gpt")
    return replace(
        config,
        data=replace(config.data, path=str(path), units="bytes"),
        run=replace(config.run, **run),
    )


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("other", ["longer", "another", "missing"])
def test_ranks_with_other_data_are_told_at_once(comm, folder, other):
    """The last rank's node has an older copy."""
    (folder / f"rank{comm.rank}").write_text("the same on all nodes " * 40)
    if comm.rank == RANKS - 1:
        path = folder / f"rank{comm.rank}"
        match other:
            case "longer":
                path.write_text("the same on all nodes " * 41)
            case "another":
                path.write_text("the same on old nodes " * 40)
            case "missing":
                path.unlink()
    told = rf"cannot be read.*rank {RANKS - 1} of" if other == "missing" else "different data: rank"
    with pytest.raises(DataError, match=told):
        Trainer(comm, text_job(folder / f"rank{comm.rank}"))


def test_data_that_have_changed_are_not_resumed_and_moved_ones_are(comm, folder):
    path = folder / "text"
    if comm.rank == 0:
        path.write_text("what was trained on " * 40)
    comm.Barrier()
    config = text_job(path, dir=str(folder))
    with Trainer(comm, config) as trainer:
        list(islice(trainer.run_epoch(0), 1))
        save(trainer, Writer(comm, checkpoints(config), keep=1, background=False))
    comm.Barrier()
    if comm.rank == 0:
        path.rename(folder / "moved")
        path.write_text("what was changed on " * 40)
    comm.Barrier()
    with Trainer(comm, text_job(folder / "moved", dir=str(folder))) as trainer:
        assert resume(trainer).step == 1
    with (
        Trainer(comm, config) as trainer,
        pytest.raises(CheckpointError, match=r"other data: what data\.path = .*has changed since"),
    ):
        resume(trainer)


@pytest.mark.parametrize("key", ["dtype", "compute"])
def test_a_checkpoint_of_other_numbers_is_refused(comm, folder, key):
    config = saved(comm, folder, steps=(1,))
    other = {"dtype": "float64", "compute": "float16"}[key]
    config = replace(config, run=replace(config.run, **{key: other}))
    with (
        Trainer(comm, config) as trainer,
        pytest.raises(CheckpointError, match=rf"run\.{key} was \w+, and is {other}"),
    ):
        resume(trainer)


def test_a_folder_of_another_job_is_left_alone_by_all_ranks(comm, folder, monkeypatch):
    config = saved(comm, folder)
    monkeypatch.setattr("mpitrain.lock._PATIENCE_S", 0.1)
    owner = b'{"host":"elsewhere","process":1,"began":"1","job":"","since":"then"}'
    if comm.rank == 0:
        (folder / "lock.json").write_bytes(owner)
    comm.Barrier()
    for go_on in (False, True):
        with (
            Trainer(comm, config) as trainer,
            pytest.raises(ConfigError, match=r"another job .process 1 on elsewhere, since then"),
        ):
            train(trainer, go_on=go_on)
    comm.Barrier()
    assert sorted(p.name for p in folder.iterdir()) == ["checkpoints", "lock.json"]
    assert len(list((folder / "checkpoints").iterdir())) == 3
    comm.Barrier()


def test_a_model_that_is_too_large_is_refused_on_all_ranks(comm, monkeypatch):
    if comm.rank == RANKS - 1:

        def initial(self, *arguments):
            raise MemoryError("Unable to allocate 954. GiB")

        monkeypatch.setattr(Model, "initial", initial)
    with pytest.raises(ConfigError, match=r"model: the parameters .*954\. GiB.*make the model"):
        Trainer(comm, mlp())


def test_state_of_a_job_is_not_changed_by_another_one(comm, folder):
    first = mapped(folder, comm.rank)(10, np.float32)
    first[:] = 7.0
    second = mapped(folder, comm.rank)(10, np.float32)
    second[:] = 8.0
    assert (first == 7.0).all()


def test_the_oldest_ones_go(comm, folder):
    config = saved(comm, folder)
    with Trainer(comm, config) as trainer:
        step = resume(trainer).step
        list(islice(trainer.run_epoch(0), 1))
        folder_of = checkpoints(trainer.config)
        save(trainer, Writer(comm, folder_of, keep=2, background=False, resumed=step))
    comm.Barrier()
    left = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert left == ["step-00000003", "step-00000004"]


def test_a_folder_that_cannot_be_written_fails_on_all_ranks(comm, folder):
    (folder / "file").touch()
    config = mlp()
    with Trainer(comm, config) as trainer:
        writer = Writer(comm, folder / "file" / "checkpoints", keep=1)
        with pytest.raises(CheckpointError, match=r"cannot write a checkpoint to .*intact"):
            save(trainer, writer)


def test_a_rank_that_is_asked_to_stop_stops_all_of_them(comm, folder):
    config = mlp()
    config = replace(
        config,
        run=replace(config.run, dir=str(folder), log_every=1000),
        checkpoint=CheckpointTable(every=3),
    )
    stop = StopFlag()
    with Trainer(comm, config, stop=stop) as trainer:
        steps = trainer.step

        def counting(epoch, batch):
            if trainer.steps_done == 6 and comm.rank == RANKS // 2:
                stop.reason = "a test"
            return steps(epoch, batch)

        trainer.step = counting
        with pytest.raises(Stopped, match=r"stopped after step 7 of 30 \(a test\)"):
            train(trainer)
    with Trainer(comm, config) as trainer:
        train(trainer, go_on=True)
        found = whole(comm, trainer)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    numbers = [int(line.split('"step":')[1].split(",")[0]) for line in lines if '"step","' in line]
    assert numbers == list(range(1, 31))
    with Trainer(comm, config) as trainer:
        for epoch in (0, 1):
            list(trainer.run_epoch(epoch))
        expected = whole(comm, trainer)
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)


def test_a_checkpoint_has_every_tensor_whole(comm, folder):
    config = saved(comm, folder, steps=(2,))
    checkpoint = Checkpoint(folder / "checkpoints" / "step-00000002")
    checkpoint.verify()
    assert checkpoint.sections == {"parameters", "velocity"}
    with Trainer(comm, config) as trainer:
        resume(trainer)
        for name, values in whole(comm, trainer).items():
            np.testing.assert_array_equal(checkpoint.tensor("parameters", name), values)
    with pytest.raises(CheckpointError, match="has no parameters of nobody"):
        checkpoint.tensor("parameters", "nobody")


@pytest.fixture
def store(comm):
    """Builds a store of two layers, of 3 and 5 numbers."""

    def make(algorithm="auto", **options):
        layers = {"a": nn.Linear(3, 1, bias=False), "b": nn.Linear(5, 1, bias=False)}
        arena = Arena(layers, {"a": {"weight": (3, 1)}, "b": {"weight": (5, 1)}})
        reduction = Reduction({DATA: comm}, Dense(algorithm), bucket_bytes=1, **options)
        return Replicated(arena, np.zeros(8), reduction, np.empty)

    return make


def backward(store, rank):
    """Gradients of rank r are r + 1 times 0, 1, 2 ..., the last layer's first."""
    store.reset()
    for layer, values in ((1, np.arange(3.0, 8)), (0, np.arange(3.0))):
        store.accumulate(layer, {"weight": (rank + 1) * values.reshape(-1, 1)})
        store.ready(layer)
        store.progress()


def summed(comm):
    return comm.size * (comm.size + 1) // 2 * np.arange(8)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("algorithm", ["auto", *EVERY_ALLREDUCE])
def test_gradients_are_summed_in_every_step(comm, store, algorithm, overlap):
    own = store(algorithm=algorithm, overlap=overlap)
    for _ in range(3):
        backward(own, comm.rank)
        assert own.wait() >= 0
        np.testing.assert_array_equal(own.gradients, summed(comm))
    own.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("algorithm", EVERY_ALLREDUCE)
def test_a_bucket_is_reduced_before_the_layers_below_are_ready(comm, store, algorithm):
    own = store(algorithm=algorithm)
    own.accumulate(1, {"weight": (comm.rank + 1) * np.arange(3.0, 8).reshape(-1, 1)})
    own.ready(1)
    for _ in range(100_000):
        own.progress()
        complete = np.array_equal(own.gradients[3:], summed(comm)[3:])
        if comm.allreduce(complete, op=MPI.LAND):
            break
    np.testing.assert_array_equal(own.gradients[3:], summed(comm)[3:])
    np.testing.assert_array_equal(own.gradients[:3], 0)
    own.wait()
    own.close()


def test_without_overlap_nothing_moves_until_the_end(comm, store):
    own = store(algorithm="ring", overlap=False)
    backward(own, comm.rank)
    comm.Barrier()
    own.progress()
    np.testing.assert_array_equal(own.gradients, (comm.rank + 1) * np.arange(8))
    own.wait()
    np.testing.assert_array_equal(own.gradients, summed(comm))
    own.close()


def test_state_in_mapped_files_changes_no_bit(comm, folder):
    plain = job("gpt", "float32", zero=1)
    mapped = replace(plain, parallel=replace(plain.parallel, offload=str(folder / "state")))
    (one, first), (two, second) = (curve(comm, config, steps=3) for config in (plain, mapped))
    np.testing.assert_array_equal(one, two)
    for name, values in first.items():
        np.testing.assert_array_equal(values, second[name])
    assert len(list((folder / "state").glob(f"rank{comm.rank}.*"))) >= 2


def test_blas_threads_share_a_node_and_stay_below_what_was_asked_for(comm):
    def most():
        return max(
            (p["num_threads"] for p in threadpool_info() if p["user_api"] == "blas"), default=1
        )

    cores = len(os.sched_getaffinity(0))
    with threadpool_limits(2 * cores, user_api="blas"), limit_blas_threads(comm):
        assert most() == max(1, cores // comm.size)
    with threadpool_limits(1, user_api="blas"), limit_blas_threads(comm):
        assert most() == 1


def test_clocks_of_other_machines_are_set_by_round_trips(comm, monkeypatch):
    ahead = 1000.0 * comm.rank
    monkeypatch.setattr(trace_module, "_clock", lambda: str(comm.rank))
    monkeypatch.setattr(trace_module, "perf_counter", lambda: time.perf_counter() + ahead)
    trace = Trace(comm.rank)
    trace.align(comm)
    comm.Barrier()
    with trace.span("now", "compute"):
        pass
    (span,) = trace._spans
    # So long may a rank be kept from the processor.
    assert max(abs(span.start - other) for other in comm.allgather(span.start)) < 100


def test_a_trace_of_all_ranks_on_one_clock(comm, folder):
    trace = Trace(comm.rank)
    trace.align(comm)
    config = job("gpt", pipe=RANKS)
    with Trainer(comm, config, span=trace.span) as trainer:
        list(islice(trainer.run_epoch(0), 2))
    trace.write(comm, folder / "trace.json")
    comm.Barrier()
    spans = read_trace(folder / "trace.json")
    assert {span.rank for span in spans} == set(range(RANKS))
    parts = trainer.parts
    for rank in range(RANKS):
        own = [span.name for span in spans if span.rank == rank and span.category == "compute"]
        assert own.count("F0") == own.count("B0") == 2
        assert len(own) == 2 * 2 * parts
    # A stage computes what the one before has sent.
    first = {(s.rank, s.name): s.start for s in reversed(spans) if s.category == "compute"}
    for rank in range(1, RANKS):
        assert first[rank, "F0"] > first[rank - 1, "F0"]


def test_a_trace_that_is_off_records_nothing(comm, folder):
    trace = Trace(comm.rank, enabled=False)
    with trace.span("F0", "compute"):
        pass
    trace.write(comm, folder / "trace.json")
    comm.Barrier()
    assert read_trace(folder / "trace.json") == []
