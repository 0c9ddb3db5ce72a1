"""Checkpoints of all ranks: runs that are stopped go on, in any layout, from what is whole."""

import shutil
from itertools import islice

import numpy as np
import pytest

from mpitrain.checkpoint.manifest import CheckpointError
from mpitrain.checkpoint.reader import CheckpointReader
from mpitrain.checkpoint.saving import resume, save
from mpitrain.checkpoint.writer import Writer
from mpitrain.config import ConfigError
from mpitrain.metrics.records import Step
from mpitrain.parallel.replicas import ReplicaMismatch
from mpitrain.run import train
from mpitrain.start import start
from mpitrain.update.agreement import NonFinite
from tests.mpi.mpitrain.layouts import (
    RANKS,
    assert_goes_on,
    few,
    in_folder,
    job,
    keep,
    layouts,
    mlp,
    text_job,
)


@pytest.mark.parametrize("layout", few("gpt", RANKS))
def test_a_run_that_was_interrupted_goes_on_bit_by_bit(comm, folder, layout):
    config = job("gpt", "float32", **layouts("gpt", RANKS)[layout])
    assert_goes_on(comm, in_folder(config, folder))


def test_a_fresh_run_leaves_no_trace_of_an_earlier_one(comm, folder):
    config = in_folder(mlp(), folder, steps=2)
    trace = folder / "trace.json"
    for go_on in (False, True, False):
        if comm.rank == 0:
            trace.write_text("an earlier run's")
        comm.Barrier()
        with start(comm, config) as trainer:
            train(trainer, go_on=go_on)
        assert trace.exists() == go_on
        comm.Barrier()
    if comm.rank == 0:
        trace.mkdir()
    comm.Barrier()
    with start(comm, config) as trainer, pytest.raises(ConfigError, match=r"trace\.json cannot"):
        train(trainer)


def saved(comm, folder, steps=(1, 2, 3)):
    """A run in ``folder`` with checkpoints after these steps; its job."""
    config = in_folder(mlp(), folder)
    with start(comm, config) as trainer:
        for step, _ in enumerate(trainer.run_epoch(0), 1):
            if step in steps:
                keep(trainer)
            if step == max(steps):
                break
    return config


def spoil_newest(folder, how):
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    file, manifest = newest / f"rank-{RANKS - 1:05d}.safetensors", newest / "manifest.json"
    data = file.read_bytes()
    match how:
        case "truncated":
            file.write_bytes(data[: len(data) // 2])
        case "one bit":
            file.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        case "missing":
            file.unlink()
        case "of another step":
            file.write_bytes((newest.with_name("step-00000002") / file.name).read_bytes())
        case "manifest cut off":
            manifest.write_bytes(manifest.read_bytes()[:-20])
        case "no manifest":
            manifest.unlink()


HOW = ("truncated", "one bit", "missing", "of another step", "manifest cut off", "no manifest",
       "verified, and missing then")  # fmt: skip


def test_a_spoilt_checkpoint_is_refused_and_the_one_before_used(comm, folder, monkeypatch):
    config, verify = saved(comm, folder), CheckpointReader.verify
    newest = folder / "checkpoints" / "step-00000003"

    def verified(self, *share):
        verify(self, *share)
        comm.Barrier()
        if comm.rank == 0 and self.folder == newest:
            spoil_newest(folder, "missing")
        comm.Barrier()

    with start(comm, config) as trainer:
        for how in HOW:
            if comm.rank == 0:
                shutil.copytree(newest, folder / "kept")
                spoil_newest(folder, how)
            if how == HOW[-1]:
                monkeypatch.setattr(CheckpointReader, "verify", verified)
            comm.Barrier()
            resumed = resume(trainer.parts)
            (refused,) = resumed.refused
            assert resumed.step == 2 and "step-00000003" in refused, how
            comm.Barrier()
            if comm.rank == 0:
                shutil.rmtree(newest)
                (folder / "kept").rename(newest)
        comm.Barrier()
        monkeypatch.undo()
        assert resume(trainer.parts).step == 3


def test_data_that_have_changed_are_not_resumed_and_moved_ones_are(comm, folder):
    path = folder / "text"
    if comm.rank == 0:
        path.write_text("what was trained on " * 40)
    comm.Barrier()
    config = text_job(path, dir=str(folder))
    with start(comm, config) as trainer:
        list(islice(trainer.run_epoch(0), 1))
        keep(trainer)
    comm.Barrier()
    if comm.rank == 0:
        path.rename(folder / "moved")
        path.write_text("what was changed on " * 40)
    comm.Barrier()
    with start(comm, text_job(folder / "moved", dir=str(folder))) as trainer:
        assert resume(trainer.parts).step == 1
    with (
        start(comm, config) as trainer,
        pytest.raises(CheckpointError, match=r"other data: what data\.path = .*has changed since"),
    ):
        resume(trainer.parts)


def test_a_folder_of_another_job_is_left_alone_by_all_ranks(comm, folder, monkeypatch):
    config = saved(comm, folder)
    monkeypatch.setattr("mpitrain.ranks.lock._PATIENCE_S", 0.1)
    owner = b'{"host":"elsewhere","process":1,"began":"1","job":"","since":"then"}'
    if comm.rank == 0:
        (folder / "lock.json").write_bytes(owner)
    comm.Barrier()
    for go_on in (False, True):
        with (
            start(comm, config) as trainer,
            pytest.raises(ConfigError, match=r"another job .process 1 on elsewhere, since then"),
        ):
            train(trainer, go_on=go_on)
    comm.Barrier()
    assert sorted(p.name for p in folder.iterdir()) == ["checkpoints", "lock.json"]
    assert len(list((folder / "checkpoints").iterdir())) == 3


def test_a_folder_that_cannot_be_written_fails_on_all_ranks(comm, folder):
    (folder / "file").touch()
    with start(comm, mlp()) as trainer:
        writer = Writer(comm, folder / "file" / "checkpoints", keep=1)
        with pytest.raises(CheckpointError, match=r"cannot write a checkpoint to .*intact"):
            save(trainer.parts, writer)


class Own(Exception):
    """An error of the program's own."""


@pytest.mark.parametrize("how", ["the loss", "a replica", "the disk", "the program"])
def test_an_error_of_all_ranks_completes_the_checkpoint_of_the_step_before(comm, folder, how):
    more = {"log_every": 1000, "check_every": 1, "checkpoint": {"every": 2}}
    config = in_folder(mlp(), folder, **more)

    def spoil(parts):
        if parts.steps_done == 2 and comm.rank == RANKS - 1 and how != "the program":
            parts.store.parameters[0] = 7.0 if how == "a replica" else np.nan
        if parts.steps_done == 2 and how == "the disk" and comm.rank == 0:
            (folder / "checkpoints" / "step-00000002").write_text("in the way")

    def fail(record):
        if isinstance(record, Step) and record.step == 3:
            raise Own(f"of rank {comm.rank}")

    kind = {"a replica": ReplicaMismatch, "the program": Own}.get(how, NonFinite)
    if how == "a replica" and RANKS == 1:
        pytest.skip("a rank is as itself")
    with start(comm, config, before_step=spoil) as trainer, pytest.raises(kind) as caught:
        train(trainer, on_record=fail if how == "the program" else None)
    found = [path.name for path in (folder / "checkpoints").iterdir()]
    if how == "the disk":
        assert "cannot write a checkpoint" in "".join(caught.value.__notes__)
        return
    assert found == ["step-00000002"]
    with start(comm, config) as trainer:
        assert resume(trainer.parts).step == 2
