"""Lines of ``metrics.jsonl`` are read back as the same records, by every version."""

import json
import math

import msgspec
import pytest

from mpitrain.config import Config
from mpitrain.metrics import records
from mpitrain.metrics.reader import read_records
from mpitrain.metrics.writer import json_lines

CONFIG = json.loads(msgspec.json.encode(Config()))
START = records.Start(2, ["a:1", "b:2"], "data 2", [["a"]], "ring", "asked", 7, CONFIG)
SUMMARY = records.Summary(1.25, 2, "ring", "asked", 100.0, 0.2, 0.1, {"accuracy": 0.75})
RECORDS = [
    START,
    records.Resumed(4, "there", ["newer: torn"]),
    records.Step(
        5, 0, 8, 1.0, 0.5, 0.1, 0.25, 32.0, 0.2, 0.1, noise=records.Noise(math.nan, 1.0, 0.0)
    ),
    records.Straggler(5, 1, "b", 2.5),
    records.Skipped(6, "rank 1: b.weight", 512.0),
    records.Epoch(0, 0.25, {"accuracy": 0.5, "mae": math.nan}),
    records.Saved(6, "there", 0.5),
    records.Times([records.RankTime(0, 0, 1.0, math.nan, {1: 0.25}, 0.125, 2**20)]),
    records.Round(7, 2, 2, 0, 0, 3, 1.0, 8, 8, 8, losses={"a": math.nan}),
    SUMMARY,
]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with json_lines(path) as write:
        for record in RECORDS:
            write(record)
    return path


def test_records_come_back_as_they_were(path):
    log = read_records(path)
    assert log.records == RECORDS
    assert (log.unknown, log.cut_off) == ([], False)
    assert log.last(records.Epoch) == RECORDS[5] and log.of(records.Saved) == [RECORDS[6]]
    assert log.start() == START and log.summary() == SUMMARY


def test_a_run_that_goes_on_has_no_summary_yet(path):
    with path.open("ab") as file:
        file.write(msgspec.json.encode(START) + b"\n")
    log = read_records(path)
    assert log.last(records.Summary) == SUMMARY and log.summary() is None
    assert log.since_start().records == []


def test_what_a_newer_version_writes(path):
    lines = path.read_text().splitlines()
    start = json.loads(lines[0])
    start |= {"weather": "fine", "config": start["config"] | {"compress": {"codec": "new"}}}
    lines[0] = json.dumps(start)
    lines.insert(3, '{"event":"compressed","step":5,"ratio":null}')
    path.write_text("\n".join(lines))  # its last line is whole without a line break
    log = read_records(path)
    assert log.unknown == ["compressed"] and not log.cut_off
    assert log.records[1:] == RECORDS[1:]
    assert log.start().config["compress"] == {"codec": "new"}


def test_a_file_that_is_cut_off_anywhere(path):
    data = path.read_bytes()
    ends = [n for n, byte in enumerate(data) if byte == ord("\n")]
    near = {end + off for end in ends for off in (-1, 0, 1, 2, 10, 11)}
    for length in sorted(near | set(range(0, len(data), 101))):
        path.write_bytes(data[:length])
        log = read_records(path)
        whole = data[: length + 1].rstrip(b"\n").count(b"\n")
        assert len(log.records) in (whole, whole + 1)
        assert log.records == RECORDS[: len(log.records)]
        assert not log.cut_off or len(log.records) == whole


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\x89PNG\r\n\x1a\n", "line 1, is no record of a run of mpitrain"),
        (b"a text without a line break", "line 1, is no record"),
        (b'{"event":"step"', None),
        (b'{"event":"step"\n', "line 1, is no record"),
        (b'{"event":"step","step":1}\n{}', "line 1, .*a step with a wrong field.* `epoch`"),
        (b'{"event":"other"}\n{"loss": 1}\n', "line 2, .*it names no event"),
        (b'{"event":"skipped","step":"1","culprits":"","loss_scale":1}', "got `str`"),
        (b"[1]", "it names no event"),
        (b"\xff\xfe", "line 1, is no record"),
        (b'{"event":"other","x":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deeply"),
        (b'{"event":"step","x":' + b"[" * 200_000, "line 1, .*it is nested too deeply"),
    ],
)
def test_a_file_that_no_run_wrote(path, content, why):
    path.write_bytes(content)
    if why is None:
        assert read_records(path).cut_off
        return
    with pytest.raises(ValueError, match=f"metrics.jsonl, .*{why}"):
        read_records(path)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match="cannot be read: it is a folder"):
        read_records(tmp_path)
    (tmp_path / "empty").touch()
    assert read_records(tmp_path / "empty").records == []
    with pytest.raises(ValueError, match="empty has no start of a run"):
        read_records(tmp_path / "empty").start()
