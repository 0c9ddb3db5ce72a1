"""A run's checkpoints in one process: which stay, which is found, and what none may say."""

import json
import os
import shutil
from itertools import islice
from pathlib import Path
from threading import get_ident

import msgspec
import numpy as np
import pytest
from mpi4py import MPI
from msgspec.structs import replace

from collectives import Communicator
from mpitrain.checkpoint.export import export
from mpitrain.checkpoint.folders import folder_name as full
from mpitrain.checkpoint.folders import step_of
from mpitrain.checkpoint.manifest import MANIFEST, CheckpointError, Manifest, Progress, encode
from mpitrain.checkpoint.reader import CheckpointReader, newest
from mpitrain.checkpoint.saving import checkpoints, resume, save
from mpitrain.checkpoint.writer import Writer
from mpitrain.config import Checkpoint as CheckpointTable
from mpitrain.config import Config, Data, Model, Optim, Run, Train, configured
from mpitrain.metrics.reader import read_records
from mpitrain.metrics.records import Resumed, Saved, Step
from mpitrain.run import train
from mpitrain.start import start
from mpitrain.update.agreement import NonFinite
from mpitrain.update.updater import Updater


@pytest.fixture
def comm():
    with Communicator(MPI.COMM_SELF) as one:
        yield one


@pytest.fixture
def job(tmp_path):
    return Config(
        run=Run(dir=str(tmp_path / "run"), log_every=1000),
        data=Data(name="clicks", samples=80, tables=2, rows=5),
        model=Model(kind="recommender", width=2, hidden=(3,)),
        optim=Optim(reference_batch=0),
        train=Train(epochs=9, steps=4, batch_size=8),
        checkpoint=CheckpointTable(every=2, background=False),
    )


def run(comm, job, steps=4, *, go_on=False, **table):
    """Trains up to this many steps; returns the folder of the checkpoints."""
    with start(comm, configured(job, {"steps": steps, "checkpoint": table})) as trainer:
        train(trainer, go_on=go_on)
    return checkpoints(job)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def numbers(folder):
    return sorted(step for name in names(folder) if (step := step_of(name)) is not None)


def spoil(checkpoint):
    """Its numbers are others than were written."""
    file = next(checkpoint.glob("rank-*"))
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_folders_of_the_user_survive_everything(comm, job):
    """They have what a checkpoint has, under names that no run gives."""
    folder = run(comm, job)
    kept = ["step-best", "step-final", "step-00000002-good", "step-4", "step-0100000000",
            "step-0000000²"]  # fmt: skip
    for name in kept:
        shutil.copytree(folder / "step-00000004", folder / name)
    (folder / "step-notes.txt").write_text("mine")
    kept.append("step-notes.txt")
    run(comm, job, 8, go_on=True)
    assert {*names(folder)} == {*kept, *map(full, (4, 6, 8))} and numbers(folder) == [4, 6, 8]
    for _ in range(3):  # each sets the one before aside
        run(comm, job)
        assert {*names(folder)} == {*kept, "earlier", *map(full, (2, 4))}
    assert numbers(folder / "earlier") == [2, 4]
    assert step_of(full(10**8)) == 10**8


def test_the_one_that_was_resumed_stays_and_a_corrupt_one_does_not_count(comm, job):
    folder = run(comm, job)
    spoil(folder / full(4))
    (folder / full(4)).rename(folder / full(50))  # newer than all that come
    run(comm, job, 6, go_on=True, keep=1)
    assert numbers(folder) == [2, 6, 50]
    assert newest(folder)[0].folder.name == full(6)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("at", [MANIFEST, ".step-00000004.removed", "step-00000004"])
def test_a_run_killed_as_it_replaces_its_only_checkpoint_goes_on_from_it(
    comm, job, monkeypatch, at
):
    """Just before something gets the name ``at``."""
    folder, rename = run(comm, job, keep=1), Path.rename

    def killed(self, target):
        if target.name == at:
            raise Killed
        return rename(self, target)

    with start(comm, job) as trainer, monkeypatch.context() as patch:
        resume(trainer.parts)
        patch.setattr(Path, "rename", killed)
        with pytest.raises(Killed):
            save(trainer.parts, Writer(comm, folder, keep=1, background=False))
    run(comm, job, 5, go_on=True, keep=1)
    log = read_records(folder.parent / "metrics.jsonl")
    assert [resumed.step for resumed in log.of(Resumed)] == [4]
    assert names(folder) == [full(4), full(5)]


def test_what_was_just_written_stays_whatever_is_newer(comm, job):
    folder = run(comm, job, 8, keep=9)
    for step in (6, 8):
        spoil(folder / full(step))
    run(comm, job, 5, go_on=True, keep=1)
    assert numbers(folder) == [4, 5, 6, 8]
    assert newest(folder)[0].manifest.progress.step == 5


def test_what_is_no_checkpoint_or_a_link_is_never_removed(comm, job, tmp_path):
    folder = run(comm, job, keep=9)
    (folder / full(1)).mkdir()
    (folder / full(1) / "notes").write_text("mine")
    (folder / full(2)).rename(tmp_path / "archive")
    (folder / full(2)).symlink_to(tmp_path / "archive")
    run(comm, job, 10, go_on=True, keep=1)
    assert numbers(folder) == [1, 2, 4, 10]
    for _ in range(3):  # each sets aside the checkpoints of the one before
        run(comm, job)
    assert CheckpointReader(tmp_path / "archive").manifest.progress.step == 2
    assert (folder / full(1) / "notes").read_text() == "mine"


def test_what_a_user_put_where_a_checkpoint_goes_is_not_replaced(comm, job):
    mine = checkpoints(job) / full(4) / "mine"
    mine.mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"in the way, and is no checkpoint; move it: .*04"):
        run(comm, job)
    assert mine.is_dir()
    assert numbers(checkpoints(job)) == [2, 4]


def test_a_last_update_that_spoils_the_parameters_is_no_success(comm, job, monkeypatch):
    def spoil_at_the_end(updater, *rates, **named):
        step(updater, *rates, **named)
        if updater.steps == 4:
            updater.store.pieces[0].parameters[...] = np.nan

    step = Updater.step
    monkeypatch.setattr(Updater, "step", spoil_at_the_end)
    with pytest.raises(NonFinite, match="the test loss is not finite after step 4"):
        run(comm, job, every=3)
    assert numbers(checkpoints(job)) == [3]


def test_eval_resume_and_export_take_the_same_one(comm, job, tmp_path):
    folder = run(comm, job, 6, keep=3)
    (folder / "step-zz").mkdir()
    spoil(folder / full(6))
    found, refused = newest(folder)
    done = export(folder.parent, tmp_path / "model")
    with start(comm, job) as trainer:
        resumed = resume(trainer.parts)
    assert found.folder == done.folder == folder / full(4)
    assert resumed.path == str(found.folder)
    assert refused == done.refused == resumed.refused
    assert "digest differs" in refused[0]
    with pytest.raises(CheckpointError, match=r"cannot write .*; name another file"):
        (tmp_path / "taken" / "model.safetensors").mkdir(parents=True)
        export(folder.parent, tmp_path / "taken")
    os.mkfifo(tmp_path / "fifo")  # as a device: a file must not take its place
    with pytest.raises(CheckpointError, match="it is a FIFO, not an ordinary file; name another"):
        export(folder.parent, tmp_path / "fifo")
    assert (tmp_path / "fifo").is_fifo()
    spoil(folder / full(4))
    spoil(folder / full(2))
    with pytest.raises(CheckpointError, match=r"has none that is whole: .*digest differs"):
        export(folder.parent, tmp_path / "model")


def test_a_linked_folder_stays_a_link(comm, job, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    folder = checkpoints(job)
    folder.parent.mkdir()
    folder.symlink_to(scratch)
    for _ in range(3):
        run(comm, job)
        assert folder.readlink() == scratch
        assert numbers(scratch) == [2, 4]
    assert numbers(scratch / "earlier") == [2, 4]
    assert not (folder.parent / "checkpoints.earlier").exists()
    run(comm, job, 6, go_on=True)
    assert numbers(scratch) == [4, 6]
    scratch.rename(tmp_path / "away")  # a disk that is not mounted is noticed before the first step
    for go_on in (False, True):
        with pytest.raises(CheckpointError, match=f"{scratch} is not there, to which it is a link"):
            run(comm, job, go_on=go_on)
    assert len(read_records(folder.parent / "metrics.jsonl").of(Step)) == 6


FIRST = "linear0.linear.weight"
#: Places in a manifest, and what is put there, or made of what was there.
LIES = {
    "type": ("dtypes", FIRST, "bogus"),
    "another type": ("dtypes", FIRST, "float64"),
    "huge": ("shapes", FIRST, [2**40]),
    "huger": ("shapes", FIRST, [2**70]),
    "axes": ("shapes", FIRST, [1] * 100),
    "negative": ("shapes", FIRST, [-1]),
    "step before": ("progress", "step", -5),
    "step after": ("progress", "step", 10**9),
    "updates": ("progress", "updates", -1),
    "more updates": ("progress", "updates", 99),
    "job": ("job", "{{{"),
    "infinite job": ("job", '{"optim":{"clip_norm":null}}'),
    "no pieces": ("pieces", []),
    "twice": ("pieces", lambda pieces: [*pieces, pieces[0]]),
    "axis": ("pieces", 0, "axis", -7),
    "section": ("pieces", 0, "section", "velocity"),
    "key": ("pieces", 0, "key", "parameters.nope"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies_is_refused_and_the_one_before_taken(comm, job, lie, tmp_path):
    folder = run(comm, job)
    path = folder / full(4) / MANIFEST
    manifest = part = msgspec.json.decode(path.read_bytes())
    *place, last, value = LIES[lie]
    for key in place:
        part = part[key]
    part[last] = value(part[last]) if callable(value) else value
    path.write_text(json.dumps(manifest))
    found, refused = newest(folder)
    assert found.folder.name == full(2)
    (reason,) = refused
    assert full(4) in reason and "\n" not in reason and len(reason) < 300
    with pytest.raises(CheckpointError):
        export(folder / full(4), tmp_path / "model")
    assert export(folder.parent, tmp_path / "model").folder.name == full(2)


NO_FILES = {
    "a FIFO": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
}


@pytest.mark.parametrize("what", [MANIFEST, "rank-00000.safetensors"])
@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_is_refused_at_once(comm, job, what, kind):
    path = run(comm, job) / full(4) / what
    path.unlink()
    NO_FILES[kind](path)
    found, refused = newest(checkpoints(job))
    assert found.folder.name == full(2)
    assert f"{path} cannot be read: it is {kind}, not an ordinary file" in refused[0]


def test_a_manifest_is_written_only_if_it_is_read_again(comm, job):
    good = Manifest(1, Progress(3, 3), "{}", "", {}, {}, {}, [])
    assert msgspec.json.decode(encode(good), type=Manifest) == good
    for progress in (Progress(3, 3, np.inf), Progress(2**60, 3)):
        with pytest.raises(CheckpointError, match="what would be written is not a manifest"):
            encode(replace(good, progress=progress))
    with start(comm, job) as trainer:
        list(islice(trainer.run_epoch(0), 1))
        trainer.parts.scale.value = np.inf
        writer = Writer(comm, checkpoints(job), keep=1, background=False)
        with pytest.raises(CheckpointError, match=r"cannot write .*loss_scale.*intact"):
            save(trainer.parts, writer)
    assert not numbers(checkpoints(job))


def test_checkpoints_in_the_foreground_are_told_and_timed(comm, job):
    log = read_records(run(comm, job, background=False, mtbf=1.0).parent / "metrics.jsonl")
    assert [saved.step for saved in log.of(Saved)] == [2, 4]
    assert "loses least" in str(log.summary())


def test_the_seconds_of_a_write_end_with_it(comm, job, tmp_path, monkeypatch):
    """However late a step looks whether it has ended, and whatever clock the thread has."""
    now, own = 5.0, get_ident()
    monkeypatch.setattr(
        "mpitrain.checkpoint.writer.perf_counter", lambda: now + 1e6 * (get_ident() != own)
    )
    with start(comm, job) as trainer:
        writer = Writer(comm, tmp_path, keep=1)
        save(trainer.parts, writer)
        writer._thread.join()
        now = 1000.0
        assert writer.finish()[1] == 0.0
