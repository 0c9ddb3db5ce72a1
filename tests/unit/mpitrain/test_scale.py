"""Findings of ``mpitrain scale`` on runs, beside laws that are known."""

import json
import math
from pathlib import Path

import pytest

from mpitrain.__main__ import main
from mpitrain.commands.scale import measured, reached
from mpitrain.config import ConfigError
from mpitrain.metrics.reader import Log
from mpitrain.metrics.records import Epoch, Start, Step


def log(ranks, steps, *more, batch=64):
    """Records of steps, each with its seconds and loss, ten an epoch."""
    found = [Start(ranks, [], "", [], "", "", 0, {})]
    for number, (seconds, loss) in enumerate(steps):
        rate = batch / seconds
        found.append(Step(number + 1, number // 10, batch, loss, 1.0, 0.1, seconds, rate, 0.0))
    return Log(Path("metrics.jsonl"), [*found, *more], [], cut_off=False)


def test_amdahls_law_comes_back_from_its_own_times():
    def size(ranks, *first):
        return measured(log(ranks, [(9.0, 1.0), *[(0.2 + 0.8 / ranks, 1.0)] * 5]), 0, *first)

    first = size(1)
    for ranks in (2, 4, 8):
        found = size(ranks, first)
        assert found.speedup == pytest.approx(1 / (0.2 + 0.8 / ranks))
        assert found.efficiency == pytest.approx(found.speedup / ranks)
        assert found.serial == pytest.approx(0.2)


def test_a_batch_that_grows_in_the_same_time_is_efficient_and_servers_are_no_workers():
    first = measured(log(2, [(1.0, 1.0)] * 3, batch=8), 1)
    found = measured(log(5, [(1.0, 1.0)] * 3, batch=32), 1, first)
    assert (found.workers, found.speedup, found.efficiency) == (4, 4.0, 1.0)
    assert math.isnan(found.serial)


def test_a_goal_is_reached_by_ten_steps_or_by_a_test():
    steps = [(0.5, 1.0)] * 10 + [(0.5, 0.0)] * 10
    test = Epoch(1, 0.4, {"accuracy": 0.9})
    found = log(2, steps, test)
    assert reached(found, "loss", 0.5, 640) == (15, 1.5, 7.5)
    for goal in (("accuracy", 0.9), ("test_loss", 0.4)):
        assert reached(found, *goal, 640) == (20, 2.0, 10.0)
    assert all(map(math.isnan, reached(found, "accuracy", 0.95)))
    with pytest.raises(ConfigError, match="--until mae: tests measure test_loss, accuracy"):
        reached(found, "mae", 1.0)
    with pytest.raises(ConfigError, match="--until accuracy: the job has nothing to test on"):
        reached(log(2, steps), "accuracy", 0.95)


def test_a_metric_of_ones_own_needs_its_direction():
    """Otherwise a poor first value would be below the goal, and so reach it."""
    found = log(2, [(0.5, 1.0)] * 10, Epoch(0, 0.4, {"score": 0.1}))
    with pytest.raises(ConfigError, match="whether a higher 'score' is better; write "):
        reached(found, "score", 0.9)
    assert math.isnan(reached(found, "higher score", 0.9)[0])
    assert reached(found, "lower score", 0.9)[0] == 10


def test_a_first_step_alone_is_no_measure():
    with pytest.raises(ConfigError, match="give --steps 2 or more"):
        measured(log(2, [(9.0, 1.0)]))


def test_rows_are_written_before_a_larger_size_fails(tmp_path, monkeypatch):
    def trained(job, ranks, *_):
        if ranks > 2:
            raise ConfigError("a rank has died")
        return log(ranks, [(1.0, 1.0)] * 3)

    monkeypatch.setattr("mpitrain.commands.scale.trained", trained)
    monkeypatch.chdir(tmp_path)
    assert main(["scale", "digits_mlp", "-n", "4,2,1,2", "--json", "rows.json"]) == 2
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["ranks"] for row in rows] == [1, 2]
    assert [row.name for row in tmp_path.iterdir()] == ["rows.json"]


def test_a_job_that_workers_slow_down_has_no_serial_share(monkeypatch, capsys):
    monkeypatch.setattr(
        "mpitrain.commands.scale.trained", lambda job, ranks, *_: log(ranks, [(ranks, 1.0)] * 3)
    )
    assert main(["scale", "digits_mlp", "-n", "1,2"]) == 0
    assert "serial% above 100: communication" in capsys.readouterr().out


@pytest.mark.parametrize("goal", ["loss=nan", "loss", "loss=x", "loss=inf"])
def test_a_goal_is_a_finite_number(goal, capsys):
    with pytest.raises(SystemExit):
        main(["scale", "digits_mlp", "-n", "1", "--until", goal])
    assert "expected a goal, as loss=0.3" in capsys.readouterr().err


def test_without_a_launcher_virtual_ranks_are_the_way_out(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPIEXEC", "/nowhere/mpiexec")
    assert main(["scale", "digits_mlp", "-n", "1"]) == 2
    assert "set MPIEXEC to MPI's launcher, or give --virtual" in capsys.readouterr().err
