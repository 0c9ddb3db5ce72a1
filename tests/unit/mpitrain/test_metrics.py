"""Records as lines of JSON and as lines on the console."""

import json
import os
import resource
from contextlib import contextmanager

import msgspec
import pytest
from msgspec.structs import replace

from mpitrain.config import Config, Run
from mpitrain.metrics import recorder
from mpitrain.metrics.reader import read_records
from mpitrain.metrics.records import Epoch, Resumed, Saved, Skipped, Start, Step, Summary
from mpitrain.metrics.writer import ReportError, json_lines

FIELDS = {
    "step": 1, "epoch": 0, "samples": 64, "loss": 2.5, "grad_norm": 1.25, "lr": 0.1,
    "seconds": 0.5, "samples_per_s": 128.0, "comm_share": 0.25, "wait_share": 0.125,
}  # fmt: skip
STEP = Step(**FIELDS)


@pytest.fixture
def job(tmp_path):
    return Config(run=Run(dir=str(tmp_path / "deep" / "run"), log_every=2))


def write_all(job):
    told = msgspec.to_builtins(job)
    with recorder(job, steps=4) as write:
        write(Start(2, ["a:1", "b:2"], "data 2 x pipe 1", [["a"]], "ring", "asked [for]", 7, told))
        for step in range(1, 5):
            write(replace(STEP, step=step))
        write(Skipped(5, "rank 1: b.weight", 512.0))
        write(Epoch(epoch=0, test_loss=0.25, metrics={"accuracy": 0.5}))
        write(Saved(4, "there", 0.5))
        write(Resumed(4, "there", ["newer: torn"]))
        write(Summary(0.5, 2, "ring", "asked [for]", 1000.4, 0.25, 0.125, {"accuracy": 0.975}))


def test_each_record_is_a_line_of_json(job, tmp_path):
    write_all(job)
    lines = (tmp_path / "deep" / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    kinds = ["start", *["step"] * 4, "skipped", "epoch", "saved", "resumed", "summary"]
    assert [record["event"] for record in records] == kinds
    assert records[0]["config"]["run"]["log_every"] == 2
    defaults = dict.fromkeys(("read_share", "sent_bytes", "shared_bytes"), 0.0)
    assert records[1] == {"event": "step", **FIELDS, **defaults}


def test_lines_are_in_the_file_at_once(job, tmp_path):
    with recorder(job, steps=1) as write:
        write(STEP)
        assert '"loss":2.5' in (tmp_path / "deep" / "run" / "metrics.jsonl").read_text()


def test_console_shows_every_so_many_steps(job, capsys):
    write_all(job)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == ("2 ranks (data 2 x pipe 1), 7 parameters, gradients by ring (asked [for])")
    assert lines[1].split() == ["step", "loss", "grad_norm", "lr", "samples/s", "reduce%", "wait%"]
    assert [line.split()[0] for line in lines[2:5]] == ["1", "2", "4"]
    assert lines[2].split() == ["1", "2.5000", "1.2500", "0.1", "128", "25.0", "12.5"]
    assert lines[5] == "step 5 skipped: not finite (rank 1: b.weight); loss scale 512"
    assert lines[6] == "epoch 0: test accuracy 50.00%, loss 0.2500"
    assert lines[7:10] == [
        "checkpoint there (0.50 s)",
        "checkpoint refused: newer: torn",
        "resumed after step 4 from there",
    ]
    assert lines[10] == (
        "test accuracy 97.50%, 2 ranks, gradients by ring (asked [for]), 1000 samples/s, "
        "reduction 25.0% and waiting 12.5% of step time"
    )
    assert "\x1b" not in "".join(lines)


def test_a_new_run_folder_is_the_users_own(tmp_path):
    with recorder(Config(run=Run(dir=str(tmp_path / "a" / "new"))), steps=1):
        pass
    assert (tmp_path / "a" / "new").stat().st_mode & 0o777 == 0o700
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o770)
    with recorder(Config(run=Run(dir=str(shared))), steps=1):
        pass
    assert shared.stat().st_mode & 0o777 == 0o770


def test_curves_for_tensorboard(tmp_path):
    job = Config(run=Run(dir=str(tmp_path), tensorboard=True))
    for done in (0, 1):
        with recorder(job, steps=3, done=done) as write:
            for step in (done + 1, done + 2):
                write(Step(step, 0, 8, 1.0 / step, 0.5, 0.1, 0.25, 32.0, 0.2))
            write(Epoch(0, 0.5, {"accuracy": 0.75}))
    files = list((tmp_path / "tensorboard").glob("events.*"))
    content = b"".join(file.read_bytes() for file in files)
    for name in (b"loss", b"grad_norm", b"test_accuracy"):
        assert name in content


@contextmanager
def full_disk(size):
    """No file of this process can grow past size bytes, and pytest's own report is one of them."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_is_one_sentence(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with full_disk(2048), pytest.raises(ReportError) as caught, json_lines(path) as write:
        for _ in range(99):
            write(STEP)
    assert str(caught.value).startswith(f"{path} cannot be written: ")
    assert "make room or choose another run.dir" in str(caught.value)
    whole = path.read_bytes().splitlines()[:-1]
    assert len(whole) > 5


@pytest.mark.parametrize("name", ["metrics.jsonl", ".metrics.jsonl.unfinished"])
def test_a_run_does_not_wait_for_a_fifo(tmp_path, name):
    """Nobody writes to it: whoever opened it would wait for ever."""
    path = tmp_path / "metrics.jsonl"
    with json_lines(path) as write:
        write(STEP)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    if name == "metrics.jsonl":
        with pytest.raises(ReportError, match="it is a FIFO"), json_lines(path, STEP.step):
            pass
        with pytest.raises(ValueError, match="it is a FIFO"):
            read_records(path)
        return
    with json_lines(path, STEP.step) as write:
        write(STEP)
    assert len(read_records(path).records) == 2


@pytest.mark.parametrize("is_replaced", [False, True])
def test_records_of_a_file_that_is_gone_are_not_lost_in_silence(tmp_path, is_replaced):
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(ReportError, match="it was removed or replaced"), json_lines(path) as write:
        write(STEP)
        path.unlink()
        if is_replaced:
            path.touch()
        write(STEP)
        write(Epoch(epoch=0, test_loss=0.25))


def test_a_report_where_a_folder_is(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ReportError, match="Is a directory"), json_lines(tmp_path / "metrics.jsonl"):
        pass
