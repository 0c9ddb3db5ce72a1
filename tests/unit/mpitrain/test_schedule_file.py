"""Schedules in torch's CSV format: written, read, proved and refused."""

import pytest

from mpitrain.pipeline.actions import Pipeline
from mpitrain.pipeline.replay import PipelineError, replay
from mpitrain.pipeline.schedule_file import find, read, write
from mpitrain.pipeline.schedules import SCHEDULES
from mpitrain.pipeline.simulate import simulate


@pytest.mark.parametrize("name", [n for n, s in SCHEDULES.items() if s.synchronous])
def test_a_written_schedule_is_read_as_it_was(name, tmp_path):
    schedule = SCHEDULES[name]
    report = replay(schedule.generate, schedule.pipeline((1,) * 3, 6, 2))
    write(report, tmp_path / "own.csv")
    found, shape = read(tmp_path / "own.csv")
    assert found.name == "own" and find(str(tmp_path / "own.csv")).chunks == shape.chunks
    again = replay(found.generate, shape)
    assert again.actions == report.actions
    assert again.pipeline.dealt == report.pipeline.dealt
    # A job's replicas all go by the rows.
    wide = replay(found.generate, found.pipeline((2,) * 3, 12, 1))
    assert [str(actions[0]) for actions in wide.actions.values()] == ["F0", "F1"] * 3


def test_what_torch_writes_is_read(tmp_path):
    torch = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = SCHEDULES["zb_v"]
    report = replay(schedule.generate, schedule.pipeline((1,) * 2, 4, 2))
    write(report, tmp_path / "ours.csv")
    rows = [
        [torch._Action.from_str(field) for field in line.split(",")]
        for line in (tmp_path / "ours.csv").read_text().splitlines()
    ]
    torch._validate_schedule(dict(enumerate(rows)), 2, 4, 4)
    overlapped = "0F0,0F1,(3F0;3B0)OVERLAP_F_B,3F1,3B1,0B0,,0B1\n1F0,2F0,1RECV_F1,1F1,2F1,2B0,1B0,"
    (tmp_path / "theirs.csv").write_text(f"{overlapped}2B1,1B1\n")
    found, shape = read(tmp_path / "theirs.csv")
    assert shape.dealt == ((0, 3), (1, 2))
    assert list(map(str, found.generate(shape, 0, 0)))[2:4] == ["1F0", "1B0"]
    assert simulate(found.generate, shape).seconds > 0


def test_any_placement_is_proved(tmp_path):
    (tmp_path / "own.csv").write_text("2F0,3F0,3B0,2B0\n0F0,1F0,1B0,0B0\n")
    found, shape = read(tmp_path / "own.csv")
    assert shape.dealt == ((2, 3), (0, 1))
    assert replay(found.generate, shape).held == {(0, 0): 2, (1, 0): 2}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0,0X0", "'0X0' is no pass; give a virtual stage"),
        ("0F0,0B0\n0F1,0B1", "each in one row"),
        ("0F0,0B0\n2F0,2B0", "counted from 0"),
        ("0F0,0B0,1F0,1B0\n2F0,2B0", "equally many"),
        ("", "it has none"),
    ],
)
def test_what_is_no_schedule_is_refused(text, words, tmp_path):
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(ValueError, match=words):
        find(str(tmp_path / "bad.csv"))


def test_a_file_is_proved_and_is_for_its_own_pipeline(tmp_path):
    (tmp_path / "own.csv").write_text("0F0,0B0\n1B0,1F0\n")
    found, shape = read(tmp_path / "own.csv")
    with pytest.raises(PipelineError, match="B0 comes before the forward pass"):
        replay(found.generate, shape)
    with pytest.raises(ValueError, match="2 stages and 1 micro-batches a replica, not 3 and 1"):
        replay(found.generate, Pipeline((1,) * 3, 1))
    with pytest.raises(ValueError, match="no schedule 'other'; there are gpipe"):
        find("other")
    with pytest.raises(ValueError, match="cannot be read"):
        find(str(tmp_path / "missing.csv"))
