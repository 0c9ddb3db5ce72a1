"""Reports of runs that ended, and of those that did not."""

import json

import pytest

from mpitrain.commands.arguments import parse
from mpitrain.commands.compare import compare
from mpitrain.commands.offline import run as run_offline
from mpitrain.config import Config, Run
from mpitrain.metrics import Epoch, Resumed, Skipped, Start, Step, Summary, recorder
from mpitrain.report import write_report
from mpitrain.trace import Span, chrome, read_trace


@pytest.fixture
def folder(tmp_path):
    job = Config(run=Run(dir=str(tmp_path), log_every=1000))
    with recorder(job, steps=3) as write:
        write(
            Start(
                2, ["a:1", "b:2"], "data 1 x pipe 2", [["a", "<b>"], ["c"]], "ring", "asked", 7, job
            )
        )
        for step in range(1, 4):
            write(Step(step, 0, 8, 1.0 / step, 0.5, 0.1, 0.25, 32.0, 0.2))
        write(Skipped(4, "rank 1: <script>", 2.0))
        write(Resumed(4, "there", ["newer: torn"]))
        write(Epoch(0, 0.5, 1.5))
        write(Summary(0.75, 1.25, 2, "ring", "asked", 100.0, 0.2))
    return tmp_path


def test_a_report_is_one_file_with_everything(folder):
    spans = [
        Span(rank, f"{kind}{m}", "compute", m + off, m + off + 0.5, {"micro_batch": m, "chunk": 0})
        for rank in range(2)
        for m in range(3)
        for kind, off in (("F", 0.0), ("B", 10.0))
    ] + [Span(rank, "update", "update", 20.0, 20.1, {}) for rank in range(2)]
    (folder / "trace.json").write_text(json.dumps(chrome(spans)))
    found = read_trace(folder / "trace.json")
    assert len(found) == len(spans)
    assert found[0].name == "F0" and found[0].stop == pytest.approx(0.5)
    page = write_report(folder).read_text()
    assert page.count("<svg") == 4
    for part in ("75.00%", "data 1 x pipe 2", "optim.lr", "newer: torn", "a, &lt;b&gt;"):
        assert part in page
    assert "<script" not in page and "http://" not in page.replace("http://www.w3.org", "").replace(
        "http://purl.org", ""
    ).replace("http://creativecommons.org", "")


def test_a_run_that_was_killed_while_it_wrote(folder):
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]) + lines[3][:20])
    page = write_report(folder).read_text()
    assert "the run was killed while it wrote it" in page
    assert "the run has no summary" in page


def test_no_run(tmp_path, capsys):
    with pytest.raises(ValueError, match=r"metrics\.jsonl cannot be read: No such file"):
        write_report(tmp_path)
    assert run_offline(parse(["report", str(tmp_path)])) == 2
    assert "mpitrain: " in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text('{"event":"other"}\nnonsense\n{}\n')
    with pytest.raises(ValueError, match="line 2, is no record"):
        write_report(tmp_path)
    (tmp_path / "trace.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a trace"):
        read_trace(tmp_path / "trace.json")


@pytest.mark.parametrize("event", ["step", "epoch", "summary"])
def test_losses_that_are_not_finite(folder, event):
    """JSON has no nan and no infinity: both are written as null."""
    path = folder / "metrics.jsonl"
    lines = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if record["event"] == event:
            record |= {key: None for key, value in record.items() if isinstance(value, float)}
        lines.append(json.dumps(record))
    path.write_text("\n".join(lines))
    assert "nan" in write_report(folder).read_text()
    assert folder.name in compare(folder.parent)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"event":"step","step":1}', "a step without epoch"),
        ('{"event":"epoch","epoch":0,"test_accuracy":"<b>","test_loss":1}', "is '<b>', not a numb"),
        ("[]", "it names no event"),
    ],
)
def test_a_line_that_is_no_record_is_named(folder, line, why):
    path = folder / "metrics.jsonl"
    path.write_text(line + "\n" + path.read_text())
    with pytest.raises(ValueError, match=rf"metrics\.jsonl, line 1, is no record: .*{why}"):
        write_report(folder)


def test_a_run_that_wrote_nothing_does_not_hide_the_others(folder, capsys):
    runs = folder / "runs"
    for name in ("empty", "good"):
        (runs / name).mkdir(parents=True)
    (runs / "empty" / "metrics.jsonl").touch()
    (runs / "good" / "metrics.jsonl").write_bytes((folder / "metrics.jsonl").read_bytes())
    assert run_offline(parse(["compare", str(runs)])) == 0
    out = capsys.readouterr().out
    assert "75.00%" in out and "empty/metrics.jsonl has no start of a run" in out
    (runs / "good" / "metrics.jsonl").unlink()
    assert run_offline(parse(["compare", str(runs)])) == 2
    assert "has no start of a run" in capsys.readouterr().err


def test_a_continued_run_keeps_what_it_reported(folder):
    job = Config(run=Run(dir=str(folder), log_every=1000))
    with recorder(job, steps=3, done=2) as write:
        write(Step(3, 0, 8, 9.0, 0.5, 0.1, 0.25, 32.0, 0.2))
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [line.split('"step":')[1][0] for line in lines if '"event":"step"' in line] == list(
        "123"
    )
    assert '"loss":9.0' in lines[-1]


def test_schedules_are_printed_and_drawn(tmp_path, capsys):
    argv = ["schedules", "1f1b", "zero_bubble", "-p", "2", "-m", "3", "-o", str(tmp_path)]
    assert run_offline(parse(argv)) == 0
    out = capsys.readouterr().out
    assert "bubble 25.0% (formula 25.0%), activations held [2, 1]" in out
    assert (tmp_path / "zero_bubble.png").exists()
    assert run_offline(parse(["schedules", "nothing"])) == 2
    assert "no schedule 'nothing'" in capsys.readouterr().err
