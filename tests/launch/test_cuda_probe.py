"""The probe's two ranks really exchange a message; a module with CuPy's few names stands in."""

import os
from importlib.util import find_spec

import pytest

from collectives.execution.transport.cuda_probe import probe

CUPY = """
import os, sys
from types import SimpleNamespace
import numpy as np
from numpy import *

class Device:
    def __init__(self, number):
        self.number = number
    def use(self):
        if os.environ.get("DIES") == str(self.number):
            os.abort()

class Stream:
    def synchronize(self):
        pass

cuda = SimpleNamespace(Device=Device, get_current_stream=Stream)
"""


@pytest.fixture(autouse=True)
def forgotten():
    probe.cache_clear()
    yield
    probe.cache_clear()


@pytest.mark.parametrize("dies", ["", "1"])
def test_a_message_between_two_ranks_arrives_or_is_said_not_to(tmp_path, monkeypatch, dies):
    (tmp_path / "cupy.py").write_text(CUPY)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("DIES", dies)
    works, seen = probe(0, 1)
    assert works == (seen == "device memory arrived") == (not dies) and seen


@pytest.mark.skipif(find_spec("cupy") is not None, reason="CuPy is here")
def test_without_cupy():
    works, seen = probe()
    assert not works and "No module named 'cupy'" in seen


def test_without_a_launcher(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name, path=None: None)
    works, seen = probe(3)
    assert not works and "there is no mpiexec to try it with" in seen
