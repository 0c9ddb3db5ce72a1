"""Faults as they are drawn, written and read, and the table of what came of them."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from mpitrain.config import ConfigError
from mpitrain.metrics.records import Start, Straggler
from mpitrain.metrics.writer import json_lines
from tests.drills import KINDS, Fault, draw, drill, parse
from tests.drills.drill import Outcome
from tests.drills.inject import Injector, flip
from tests.drills.table import markdown


@given(st.sampled_from(list(KINDS)), st.integers(0, 10**6), st.integers(1, 64), st.integers(2, 500))
def test_faults_are_drawn_within_the_job_and_survive_writing(kind, seed, ranks, steps):
    fault = draw(kind, seed, ranks, steps)
    assert fault == draw(kind, seed, ranks, steps)
    assert 0 <= fault.rank < ranks
    assert 2 <= fault.step <= max(2, steps)
    assert parse(str(fault)) == fault


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no fault ''; there are kill, daemon"),
        ("burn rank=1", "no fault 'burn'"),
        ("kill node=1", "'node=1' is no part of a fault"),
        ("kill rank=one", "'rank=one' has no number"),
    ],
)
def test_faults_that_are_none(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_a_fault_on_a_rank_that_is_not_there():
    with pytest.raises(ConfigError, match=r"^there is no rank 1 of 1$"):
        Injector(parse("kill rank=1 step=2"), MPI.COMM_SELF)


def test_what_must_be_said_of_a_fault():
    kill = Fault("kill", 2, 7).named()
    assert kill.search("prterun noticed that process rank 2 with PID 17 exited on signal 9")
    assert kill.search("=   RANK 2 PID 17 RUNNING AT host")
    assert not kill.search("process rank 21 with PID 17")
    assert Fault("memory", 2, 7).named().search("replicas differ after step 7: rank 0 against 2")
    assert not Fault("memory", 2, 7).named().search("replicas differ after step 17: rank 0 against")


def test_a_flip_changes_one_bit():
    data = np.zeros(100, np.uint8)
    flip(data, random.Random(1))
    assert np.unpackbits(data).sum() == 1


def test_the_table():
    text = markdown(
        [
            Outcome("kill rank=0 step=3", "kill", "named", True, 1.5, "rank 0", 2),
            Outcome("kill rank=1 step=4", "kill", "hangs", False, 60.0, "nothing\nmore"),
            Outcome("pause rank=1 step=4", "pause", "went on", True, 2.0),
            Outcome("full rank=1 step=4", "full", "skipped", True, words="needs root"),
        ]
    )
    assert "| `kill`: a rank is killed | 2 | 0 | 1 | 1 | 60.0 s | 2 |" in text
    assert "| `pause`: a rank stands still for a while | 1 | 1 | 0 | 0 | 2.0 s | 0 |" in text
    assert "`kill rank=1 step=4` hangs: nothing more" in text
    assert "`full` skipped: needs root" in text
    assert "| `full`" not in text


def test_a_drill_reads_what_the_run_reported(tmp_path):
    (tmp_path / "output").write_text("PID 17 RUNNING AT a\n")
    assert drill._said(tmp_path) == "PID 17 RUNNING AT a\n"
    assert drill._straggler(tmp_path) == ""
    with json_lines(tmp_path / "metrics.jsonl") as write:
        write(Start(2, ["a:16", "a:17"], "data 2", [["a"]], "ring", "asked", 7, {}))
        write(Straggler(5, 0, "a", 1.5))
        write(Straggler(10, 1, "a", 2.5))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"event":"strag')  # the run was killed
    assert drill._said(tmp_path).endswith("\nrank 1 was process a:17\n")
    assert drill._straggler(tmp_path) == "rank 1 took 2.5 times as long up to step 10"
