"""Data of the page of pipeline schedules."""

import json
import re
from itertools import pairwise

import pytest

from mpitrain.__main__ import main
from mpitrain.pipeline.actions import Pipeline
from mpitrain.pipeline.explore import record
from mpitrain.pipeline.schedules import SCHEDULES
from mpitrain.pipeline.simulate import PassTimes


def held_at(told, time):
    """Micro-batches and chunks whose activations each stage holds."""
    held = [set() for _ in told["stages"]]
    for place, kind, micro, chunk, start, _ in told["blocks"]:
        if kind == "F" and start <= time:
            held[place].add((micro, chunk))
    for place, kind, micro, chunk, _, stop in told["blocks"]:
        if kind in "BW" and stop <= time:
            held[place].discard((micro, chunk))
    return held


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_no_stage_holds_more_than_the_proof_says(name, stages):
    schedule = SCHEDULES[name]
    told = record(schedule, schedule.pipeline((1,) * stages, 8, 2), PassTimes(1.0, 1.0, 1.0))
    times = {time for block in told["blocks"] for time in block[4:]}
    most = [0] * stages
    for time in times:
        most = [max(a, len(b)) for a, b in zip(most, held_at(told, time))]
    assert most == told["held"]
    assert max(times) == told["seconds"]
    assert held_at(told, told["seconds"]) == [set()] * stages


def test_a_stage_does_one_thing_at_a_time():
    told = record(SCHEDULES["zero_bubble"], Pipeline((1,) * 4, 8), PassTimes(1.0, 2.0, 0.5))
    for place in range(4):
        spans = sorted(block[4:] for block in told["blocks"] if block[0] == place)
        assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
    busy = sum(stop - start for *_, start, stop in told["blocks"])
    assert told["bubble"] == pytest.approx(1 - busy / (4 * told["seconds"]))


def test_the_command_writes_one_file_that_loads_nothing(tmp_path, capsys):
    path = tmp_path / "new" / "page.html"
    assert main(["schedules", "gpipe", "1f1b", "-m", "4", "--html", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"wrote {path}"
    page = path.read_text()
    assert not re.search(r"\{\{|https?://|\bsrc=|@import|url\(", page)
    told = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert [run["name"] for run in told["schedules"]] == ["gpipe", "1f1b"]
    assert told["title"] == "Pipeline schedules: 4 stages, 4 micro-batches"
