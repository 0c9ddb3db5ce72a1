"""``python -m benchmarks.ddp``: a GPT's step beside DistributedDataParallel's."""

import json

import pytest

from tests.launch.test_examples import pytestmark, run  # noqa: F401

pytest.importorskip("torch", reason="torch is not installed: make test TORCH=1")
SMALL = "--vocabulary=11 --context=4 --width=8 --blocks=1 --heads=1 --batch=2 --steps=2 --warmup=1"


def test_all_rows_are_measured(tmp_path):
    told = tmp_path / "ddp.json"
    printed = run(tmp_path, 2, "-m", "benchmarks.ddp", *SMALL.split(), f"--json={told}")
    assert "our layers" in printed and "hidden by overlap" in printed
    assert all(len(seconds) == 2 for seconds in json.loads(told.read_text())["rows"].values())
