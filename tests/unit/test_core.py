"""The core imports no extra: what the registries name is imported when somebody asks for it."""

import ast
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

import collectives.extras
import mpitrain.extras

ROOT = Path(__file__).parents[2]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("collectives", "mpitrain")
    for path in (ROOT / package).rglob("*.py")
}
#: From here on, what an all-reduce and a job of tables alone import.
CORE = ("collectives.communicator", "mpitrain.__main__", "mpitrain.commands.ranks")
REGISTRIES = (collectives.extras, mpitrain.extras)
#: Whole folders that are extras; of other folders, the modules that the registries name.
FOLDERS = tuple(
    f"{package}.{folder}."
    for package, folders in {
        "collectives": "analysis bench compile run torch virtual",
        "mpitrain": "adapters certify compress doctor federated report search server sync",
    }.items()
    for folder in folders.split()
)
EXTRAS = [getattr(registry, name) for registry in REGISTRIES for name in dir(registry)]
EXTRAS = [extra for extra in EXTRAS if isinstance(extra, collectives.extras.Extra)]


def imported(body):
    """Names of what code imports when it is imported itself, by reading it."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from imported(node.orelse)
        elif not isinstance(node, ast.FunctionDef):
            yield from imported(ast.iter_child_nodes(node))


def core():
    """The modules of the core, with one that imports each."""
    found, waiting = {}, [(name, "") for name in CORE]
    while waiting:
        name, by = waiting.pop()
        if name in FILES and name not in found:
            found[name] = by
            others = imported(ast.parse(FILES[name].read_text()).body)
            waiting += [(other, name) for other in (name.rpartition(".")[0], *others)]
    return found


def test_the_core_imports_no_extra():
    named = {extra.where.partition(":")[0] for extra in EXTRAS}
    found = {
        name: by for name, by in core().items() if name in named or f"{name}.".startswith(FOLDERS)
    }
    assert not found, "name it in extras.py, and write extras.NAME where the core asks for it"


def test_every_extra_is_there():
    has_torch = find_spec("torch") is not None
    here = [extra for extra in EXTRAS if has_torch or "torch" not in extra.where]
    assert all(callable(extra.load()) for extra in here)


def test_threads_load_an_extra_once_it_is_whole(tmp_path, monkeypatch):
    code = "import time\nbegun = True\ntime.sleep(0.2)\ndef wanted(): return 7\n"
    (tmp_path / "slow_extra.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with ThreadPoolExecutor(4) as threads:
        found = threads.map(lambda _: collectives.extras.Extra("slow_extra:wanted")(), range(4))
    assert [*found] == [7] * 4


ALLREDUCE = """
import numpy as np
from mpi4py import MPI
from collectives import Communicator
Communicator(MPI.COMM_WORLD).Allreduce(MPI.IN_PLACE, np.ones(8))
"""
DIGITS = """
from mpitrain.__main__ import main
assert main(["train", "digits", "--set", "train.steps=2"]) == 0
"""


@pytest.mark.parametrize(("code", "most"), [(ALLREDUCE, 60), (DIGITS, 186)], ids=["sum", "job"])
def test_a_small_program_imports_few_modules(code, most, tmp_path):
    if code is DIGITS:
        pytest.importorskip("sklearn")
    count = (
        "import sys; print(*(m for m in sys.modules if m.startswith(('collectives', 'mpitrain'))))"
    )
    told = subprocess.run(
        [sys.executable, "-c", code + count], cwd=tmp_path, capture_output=True, text=True
    )
    assert told.returncode == 0, told.stderr
    modules = told.stdout.splitlines()[-1].split()
    assert len(modules) <= most, sorted(modules)
