"""``python -m tests.gpu.verify --dry-run``: the checks for a GPU, on the stand-in."""

import json

import pytest

from tests.gpu.check import Check, checks
from tests.gpu.verify import line, main, run


def test_a_few_checks_pass(tmp_path, capsys):
    path = tmp_path / "gpu.json"
    assert main(["--dry-run", f"--json={path}", "--only=facts.memory", "--most-ranks=2"]) == 0
    told = [(one["check"], one["ranks"]) for one in json.loads(path.read_text())["outcomes"]]
    assert told == [("facts.memory", 1)]
    assert "| ok" in capsys.readouterr().out


@pytest.mark.slow
def test_a_check_that_fails_or_hangs_is_said():
    (wrong,) = run([Check(0, "there is no such check", str)], 1, dry_run=True)
    assert not wrong.works
    assert "| FAIL |" in line(wrong)
    (late,) = run([Check(0, "facts.versions", str, seconds=0.05)], 1, dry_run=True)
    assert (late.works, late.detail) == (False, "no end after 0.05 s")


def test_checks_have_names_of_their_own():
    names = [one.name for one in checks()]
    assert len(names) == len(set(names))
