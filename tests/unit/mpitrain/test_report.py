"""Reports of runs that ended, and of those that did not."""

import json
import re
from html import unescape

import msgspec
import pytest

from mpitrain.commands.arguments import parse
from mpitrain.commands.offline import run as run_offline
from mpitrain.config import Config, Run
from mpitrain.metrics import recorder, records
from mpitrain.metrics.reader import read_records
from mpitrain.metrics.trace import Span, chrome, read_trace
from mpitrain.report import facts, figures, page, write_report


def written(tmp_path):
    """The folder of a run that wrote every kind of record."""
    job = Config(run=Run(dir=str(tmp_path), log_every=1000, seed=7))
    told = msgspec.to_builtins(job)
    stages = [["a", "<b>"], ["c"]]
    processes = ["a:1", "b:2"]
    with recorder(job, steps=3) as write:
        write(records.Start(2, processes, "data 1 x pipe 2", stages, "ring", "asked", 7, told))
        for step in range(1, 4):
            write(records.Step(step, 0, 8, 10.0**-step, 0.5, 0.1, 0.25, 32.0, 0.2, 0.3))
        write(records.Straggler(3, 1, "b", 2.5))
        write(records.Skipped(4, "rank 1: <script>", 2.0))
        write(records.Resumed(4, "there", ["newer: torn"]))
        write(records.Saved(4, "there", 0.5))
        write(records.Epoch(0, 1.5, {"accuracy": 0.5}))
        late = records.RankTime(1, 0, 0.7, 0.02, {}, 0.0, 10**8)
        write(records.Times([records.RankTime(0, 0, 0.1, 0.05, {1: 0.5}, 0.1, 2 * 10**8), late]))
        write(records.Summary(1.25, 2, "ring", "asked", 100.0, 0.2, metrics={"accuracy": 0.75}))
    return tmp_path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run whose report needs no figures, which take seconds."""
    for name in ("losses", "details", "gantt"):
        monkeypatch.setattr(page.figures, name, lambda *given: "")
    return written(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A report with its figures."""
    path = written(tmp_path_factory.mktemp("whole"))
    (path / "trace.json").write_text(json.dumps(chrome(traced())))
    return write_report(path).read_text()


def traced():
    """Two ranks, of which the first waits for the second."""
    passes = [
        Span(rank, f"{kind}{m}", "compute", m + off, m + off + 0.5, {"micro_batch": m, "chunk": 0})
        for rank in range(2)
        for m in range(3)
        for kind, off in (("F", 0.0), ("B", 10.0))
    ]
    waits = [Span(0, "receive for B0", "wait", 3.0, 9.0, {"source": 1})]
    return [*passes, *waits, *(Span(r, "update", "update", 20.0, 20.1, {}) for r in range(2))]


def visible(page):
    """The text of a page, without tags and style."""
    return re.sub(r"<[^>]*>", " ", re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL))


def odd(**fields):
    """A trace with one event that no run writes."""
    trace = chrome(traced())
    trace["traceEvents"][-1] |= fields
    return json.dumps(trace)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "is not a trace of mpitrain"),
        (json.dumps(chrome(traced()))[:-40], "is not a trace of mpitrain"),
        ('{"x":' + "[" * 1_000_000, "(maximum recursion depth exceeded|Stack overflow)"),
        (odd(tid=-1), "Expected `int` >= 0"),
        (odd(tid=2), "is of a run on more ranks than this one's 2"),
        (odd(ts=10**300), "Expected `float` <= "),
        (None, "it is a folder"),
    ],
)
def test_a_report_leaves_out_a_trace_that_cannot_be_used_and_says_so(folder, content, why):
    path = folder / "trace.json"
    if content is None:
        path.mkdir()
    else:
        path.write_text(content, errors="surrogateescape")
    text = unescape(visible(write_report(folder).read_text()))
    assert "Accuracy 75.00% in tests" in text
    assert re.search(rf"Passes of the last step\s+Left out: .*trace.json.*{why}", text)


def test_a_report_is_one_file_with_everything(whole):
    assert whole.count("<svg") == 3
    for part in (
        "Accuracy 75.00% in tests (test loss 1.25) after 3 steps in 0.75 s on 2 ranks of 2 hosts ",
        "50% of the time in communication, mostly waiting for rank 1; finished.",
        "waited 0.63 s for rank 1",
        "waited for nobody",
        "step 3 straggler",
        "rank 1 on b took 2.5 times as long as its peers",
        "at most 200 MB (rank 0), at least 100 MB",
        "1, 0.50 s each",
        "data 1 x pipe 2",
        "newer: torn",
        "a, &lt;b&gt;",
        "not finite: rank 1: &lt;script&gt;",
    ):
        assert part in visible(whole), part
    assert "<script" not in whole


def test_the_page_asks_for_nothing_from_the_network(whole):
    addresses = set(re.findall(r"https?://[^\"' <>]*", whole))
    assert addresses == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert not re.search(r"<(?:link|script|img|iframe)\b|@import|url\((?!#)", whole)


def test_the_slowest_is_who_spends_least_in_meetings():
    """Three ranks wait 8 s for rank 2 in sums of gradients and 1 s at the ends of steps."""
    times = [records.RankTime(0, 0, 1.0, 8.5, {}, 1.0, 0) for _ in range(4)]
    times[2] = records.RankTime(0, 0, 10.0, 0.5, {}, 0.0, 0)
    found = facts.ranks(times)
    assert facts.waited_for(found) == {2: 27.0}
    assert [rank.seconds for rank in found] == [10.5] * 4
    assert "by all ranks together: rank 2 (27 s)" in page._times(found)


def test_no_rank_is_named_for_the_noise_of_a_machine():
    times = [records.RankTime(0, 0, 10.0 + off, 1.0 - off, {}, 0.0, 0) for off in (0.0, 0.1, 0.2)]
    assert "by all ranks" not in page._times(facts.ranks(times))


KILLED = "not finished: it was killed while it wrote its last line, or is writing it now"


@pytest.mark.parametrize(
    ("kept", "cut", "status"),
    [
        *((kept, 20, KILLED) for kept in (2, 5, 8, 9)),
        (9, 0, "not finished: it is running, or was killed."),
        (10, 0, "stopped on request, and can be resumed."),
    ],
)
def test_a_run_that_did_not_end(folder, kept, cut, status):
    """The first ``kept`` lines are there, and ``cut`` bytes of the next one."""
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:kept]) + lines[kept][:cut])
    text = visible(write_report(folder).read_text())
    assert status in text
    assert ("not tested yet" in text) == (kept < 9)
    path.write_bytes(lines[0] + lines[1][:cut])
    with pytest.raises(ValueError, match="has no run with a step in it"):
        write_report(folder)


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


def test_a_continued_run_keeps_what_it_reported(folder):
    job = Config(run=Run(dir=str(folder), log_every=1000))
    with recorder(job, steps=3, done=2) as write:
        write(read_records(folder / "metrics.jsonl").start())
        write(records.Step(3, 0, 8, 9.0, 0.5, 0.1, 0.25, 32.0, 0.2))
        write(records.Back(2, 3, "high", [3], 1))
        write(records.Epoch(0, 0.5, {"mae": 0.25}))
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    steps = [line.split('"step":')[1][0] for line in lines if '"event":"step"' in line]
    assert steps == ["1", "2", "3"]
    assert '"loss":9.0' in lines[-3]
    text = " ".join(visible(write_report(folder).read_text()).split())
    assert "writes the time of each rank when it ends" in text
    assert "step 3 spike back to step 2 without 1 step (3), time 1: high" in text
    assert "epoch step measured loss 0 2 mae 0.25 0.5" in text


def test_metrics_of_the_last_test_may_be_others():
    tests = [records.Epoch(n, 0.5, {name: 0.25}) for n, name in enumerate(("accuracy", "mae"))]
    assert "mae in tests: 0.25" in visible(figures.losses([], [*enumerate(tests, 1)]))


def test_runs_are_compared_in_a_table_and_a_picture(tmp_path, capsys):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        written(tmp_path / name)
    assert run_offline(parse(["compare", str(tmp_path), "--plot", str(tmp_path / "a.svg")])) == 0
    assert "test loss" in capsys.readouterr().out
    assert (tmp_path / "a.svg").exists()


def test_schedules_are_printed_and_drawn(tmp_path, capsys):
    argv = ["schedules", "1f1b", "zero_bubble", "-p", "2", "-m", "3", "-o", str(tmp_path)]
    assert run_offline(parse(argv)) == 0
    out = capsys.readouterr().out
    assert "bubble 25.0% (formula (p-1)/(vm+p-1): 25.0%), activations of stages held [2, 1]" in out
    assert (tmp_path / "zero_bubble.png").exists()
    for few in ("-p 4 -m 2", "-p 6 -m 1 --times 1 1 3"):  # too few for the formula
        assert run_offline(parse(["schedules", "zero_bubble", *few.split()])) == 0
        assert "formula" not in capsys.readouterr().out
    for shape in ("-p 4 -m 6", "--replicas 2 1 1"):  # not for interleaved; others follow
        assert run_offline(parse(["schedules", *shape.split()])) == 0
        out = capsys.readouterr().out
        assert "\ninterleaved: " in out and "\nzero_bubble: " in out and "\nv_min: " in out
        assert run_offline(parse(["schedules", "interleaved", *shape.split()])) == 2
    capsys.readouterr()
    times = (f"--times {three}" for three in ("0 0 0", "1 -1 1", "nan 1 1"))
    for flags in (*times, "-p 0", "-m -2", "--chunks 0"):
        with pytest.raises(SystemExit, match="2"):
            parse(["schedules", *flags.split()])
    assert re.search("0' is no .*number above 0\n$", capsys.readouterr().err)
    assert run_offline(parse(["schedules", "nothing"])) == 2
    assert "no schedule 'nothing'" in capsys.readouterr().err
