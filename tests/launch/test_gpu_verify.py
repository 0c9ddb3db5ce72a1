"""``python -m tests.gpu.verify --dry-run``: the checks for a GPU, on the stand-in."""

import json
import subprocess
import sys

from tests.gpu.check import Check, checks
from tests.gpu.verify import line, run


def verify(tmp_path, *options):
    told = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "tests.gpu.verify", "--dry-run", f"--json={told}", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    return done, json.loads(told.read_text())


def test_a_few_checks_pass(scratch, tmp_path):
    done, told = verify(tmp_path, "--only=facts.memory", "--most-ranks=2")
    assert done.returncode == 0, done.stdout + done.stderr
    told = [(one["check"], one["ranks"]) for one in told["outcomes"]]
    assert told == [("facts.memory", 1)]
    assert "| ok" in done.stdout


def test_a_check_that_fails_or_hangs_is_said():
    (wrong,) = run([Check(0, "there is no such check", str)], 1, dry_run=True)
    assert not wrong.works
    assert "| FAIL |" in line(wrong)
    (late,) = run([Check(0, "facts.versions", str, seconds=0.05)], 1, dry_run=True)
    assert (late.works, late.detail) == (False, "no end after 0.05 s")


def test_checks_have_names_of_their_own():
    names = [one.name for one in checks()]
    assert len(names) == len(set(names))
