"""Records as lines of JSON and as lines on the console."""

import csv
import json
import os
import resource
import select
import sys
import termios
from contextlib import contextmanager
from pathlib import Path
from typing import get_args
from unittest.mock import MagicMock, call

import msgspec
import pytest
from msgspec.structs import replace

from mpitrain.config import Config, ConfigError, Optim, Run
from mpitrain.metrics import recorder
from mpitrain.metrics.reader import read_records
from mpitrain.metrics.records import Back, Epoch, Resumed, Saved, Skipped, Start, Step, Summary
from mpitrain.metrics.sinks import PACKAGES, SINKS, expect
from mpitrain.metrics.writer import ReportError, json_lines

FIELDS = {
    "step": 1, "epoch": 0, "samples": 64, "loss": 2.5, "grad_norm": 1.25, "lr": 0.1,
    "seconds": 0.5, "samples_per_s": 128.0, "comm_share": 0.25, "wait_share": 0.125,
    "memory": 512e6,
}  # fmt: skip
STEP = Step(**FIELDS)


@pytest.fixture
def job(tmp_path):
    return Config(run=Run(dir=str(tmp_path / "deep" / "run"), log_every=2))


def test_each_record_is_a_line_of_json_at_once(job):
    path = Path(job.run.dir, "metrics.jsonl")
    with recorder(job, steps=1) as write:
        write(STEP)
        assert '"loss":2.5' in path.read_text()
    defaults = dict.fromkeys(("read_share", "sent_bytes", "shared_bytes"), 0.0)
    assert json.loads(path.read_text()) == {"event": "step", **FIELDS, **defaults}


def test_console_shows_every_so_many_steps(job, capsys):
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
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == ("2 ranks (data 2 x pipe 1), 7 parameters, gradients by ring (asked [for])")
    shares = ["reduce%", "wait%", "read%"]
    assert lines[1].split() == ["step", "loss", "grad_norm", "lr", "samples/s", "memory", *shares]
    assert [line.split()[0] for line in lines[2:5]] == ["1", "2", "4"]
    assert lines[2].split() == [
        "1", "2.5000", "1.2500", "0.1", "128", "512", "MB", "25.0", "12.5", "0.0",
    ]  # fmt: skip
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


def test_the_console_counts_tokens_and_the_utilisation_of_a_measured_peak(tmp_path, capsys):
    """A line for each step that is readable on a terminal of 100 columns."""
    start = Start(2, [], "data 2", [["a"]], "ring", "x", 10**6, {}, tokens=64, peak=1e11)
    step = replace(STEP, step=123456, loss=12.3456, grad_norm=1234.5, samples_per_s=1234.5)
    with recorder(Config(run=Run(dir=str(tmp_path), log_every=1)), steps=4) as write:
        write(start)
        write(step)
    _, peak, head, line = capsys.readouterr().out.splitlines()
    assert peak == "peak 100 GFLOP/s of all ranks, measured"
    named = dict(zip(head.split(), line.replace(" MB", "MB").split(), strict=True))
    assert named["tokens/s"] == "79008" and named["mfu%"] == "474.0" and named["memory"] == "512MB"
    assert len(head) == len(line) <= 100


def test_a_bar_with_the_time_left_is_on_a_terminal_alone(tmp_path, monkeypatch):
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    monkeypatch.setenv("TERM", "xterm")
    told = b""
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        recorded(Config(run=Run(dir=str(tmp_path))))
        monkeypatch.undo()
        terminal.flush()
        while select.select([ours], [], [], 0)[0]:  # a piece at a time
            told += os.read(ours, 1 << 16)
    os.close(ours)
    assert b"4/4" in told and b"0:00:00" in told


def recorded(job, done=0, tested=(2, 4), steps=4):
    """A run of some steps with tests; ``done``: those of the run before."""
    with recorder(job, steps=steps, done=done) as write:
        for step in range(done + 1, steps + 1):
            write(replace(STEP, step=step, loss=1 / step))
            if step in tested:
                write(Epoch(step // 2 - 1, 0.5, {"accuracy": step / 8}))


def test_a_csv_has_a_row_for_each_step_and_test(tmp_path):
    """A run that goes on keeps those before, and new names are new columns."""
    job = Config(run=Run(dir=str(tmp_path), records=("csv",)))
    recorded(job)
    recorded(job, done=3)
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2", "2", "3", "4", "4"]
    assert [float(row["loss"]) for row in rows if row["loss"]] == [1, 1 / 2, 1 / 3, 1 / 4]
    tests = [(row["test_loss"], row["test_accuracy"]) for row in rows if not row["loss"]]
    assert tests == [("0.5", "0.25"), ("0.5", "0.5")]
    recorded(replace(job, run=replace(job.run, records=())), steps=1)
    recorded(job, done=1, steps=2)
    with (tmp_path / "metrics.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["1", "2", "2"]
    with recorder(job, steps=2) as write:  # each test is behind the step before it
        back, skipped = Back(1, 2, "high", [], 1), Skipped(2, "rank 0", 1.0)
        for record in (STEP, replace(STEP, step=2), back, Epoch(0, 0.5), skipped, Epoch(0, 0.5)):
            write(record)
    with (tmp_path / "metrics.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["1", "2", "1", "2"]


def test_curves_for_tensorboard(tmp_path, monkeypatch):
    """A run's curves take the place of an earlier one's, whether it goes on or begins."""
    from tensorboardX import SummaryWriter

    job, hidden = Config(run=Run(dir=str(tmp_path), records=("tensorboard",))), []

    def writer(folder, purge_step):
        hidden.append(purge_step)
        return SummaryWriter(folder, purge_step=purge_step)

    monkeypatch.setattr("tensorboardX.SummaryWriter", writer)
    recorded(job, steps=2)
    recorded(job, done=1, steps=3)
    assert hidden == [1, 2]
    content = b"".join(file.read_bytes() for file in tmp_path.glob("tensorboard/events.*"))
    for name in (b"loss", b"grad_norm", b"test_accuracy"):
        assert name in content


def tracker(name, monkeypatch):
    """A module that stands for a tracker's, and the run that it gives."""
    module = MagicMock()
    run = (module.init if name == "wandb" else module.start_run).return_value
    run.__enter__.return_value, run.__exit__.return_value = run, False
    run.id = run.info.run_id = "new"
    module.is_tracking_uri_set.return_value = False
    monkeypatch.setitem(sys.modules, name, module)
    return module, run


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_trackers_get_the_job_and_the_numbers_and_a_run_that_goes_on_is_the_same(
    name, tmp_path, monkeypatch
):
    module, run = tracker(name, monkeypatch)
    job = Config(run=Run(dir=str(tmp_path), records=(name,)), optim=Optim(lr=0.5))
    keys = {"run.dir": str(tmp_path), "run.records": (name,), "optim.lr": 0.5}
    recorded(job, steps=2)
    run.__exit__.assert_called_once()
    recorded(job, done=2, steps=3)
    named = {"dir": str(tmp_path), "name": tmp_path.name, "mode": "offline"}
    if name == "wandb":
        assert module.init.call_args_list == [
            call(**named, config=keys, id=None, resume=None),
            call(**named, config=keys, id="new", resume="allow"),
        ]
        run.define_metric.assert_called_with("*", step_metric="step")
        numbers = [one.args[0] for one in run.log.call_args_list]
    else:
        module.set_tracking_uri.assert_called_with(f"sqlite:///{tmp_path}/mlflow.db")
        starts = [call(run_id=None, run_name=tmp_path.name), call(run_id="new", run_name=None)]
        assert module.start_run.call_args_list == starts
        assert module.log_params.call_args_list == [call(keys), call({})]
        told = module.log_metrics.call_args_list
        assert not any(one.kwargs["synchronous"] for one in told)
        numbers = [{"step": one.kwargs["step"], **one.args[0]} for one in told]
    first, second, test, third = numbers
    assert (first["step"], first["loss"], second["step"], third["step"]) == (1, 1.0, 2, 3)
    assert test == {"step": 2, "epoch": 0, "test_loss": 0.5, "test_accuracy": 0.25}


def test_a_sink_that_fails_is_named(tmp_path, monkeypatch):
    _, run = tracker("wandb", monkeypatch)
    run.log.side_effect = KeyError("key")
    job = Config(run=Run(dir=str(tmp_path), records=("wandb",)))
    with pytest.raises(ReportError, match=r"run\.records: wandb fails: KeyError: 'key'; put that"):
        recorded(job)


def test_a_package_that_is_missing_is_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError, match=r"= \['mlflow'\] needs mlflow .* \(the extra 'mlflow'\)"):
        expect(["csv", "mlflow"])


def test_each_name_of_a_sink_has_one():
    (kind,) = [f.type for f in msgspec.structs.fields(Run) if f.name == "records"]
    assert get_args(get_args(kind)[0]) == tuple(SINKS) and PACKAGES.keys() < SINKS.keys()


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
    assert path.read_bytes().count(b"\n") > 5


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


def test_a_resumed_run_keeps_the_steps_that_were_taken_last(tmp_path):
    """Steps 1 to 6, back to 2, 3 to 8; on from step 4, and from step 1."""
    path, back = tmp_path / "metrics.jsonl", Back(2, 6, "high", [5], 1)
    with json_lines(path) as write:
        for record in (*range(1, 7), back, *range(3, 9)):
            write(record if record is back else replace(STEP, step=record))
    for done, told in ((4, [1, 2, 3, 4, 5, 6, 2, 3, 4]), (1, [1]), (0, [])):
        with json_lines(path, done):
            assert [record.step for record in read_records(path).records] == told
    (earlier,) = read_records(tmp_path / "metrics.earlier.jsonl").records
    assert earlier.step == 1


def test_a_summary_advises_on_checkpoints_and_says_what_the_busiest_rank_sends():
    """By Young: sqrt(2 * 2 s * 1 h) is 120 s, or 60 steps of 2 s."""
    summary = Summary(0.5, 2, "ring", "asked", 1e3, 0.25, step_s=2.0, save_s=2.0, mtbf=1.0)
    assert "with a failure in 1 h, checkpoint.every = 60, or 120 s, loses least" in str(summary)
    assert "loses least" not in str(replace(summary, mtbf=0.0))
    sent = replace(summary, sent_bytes=1e5, dense_bytes=1e5, busiest_bytes=3e5)
    assert "a rank sends 100 kB a step on average, the busiest 300 kB (" in str(sent)


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
