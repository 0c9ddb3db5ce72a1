"""``mpitrain keys``: every key is described, in the terminal, as lines and on the page."""

import os
import re
import subprocess
import sys
from inspect import cleandoc
from pathlib import Path

import msgspec
import pytest

from mpitrain.__main__ import main
from mpitrain.config import Config, Group
from mpitrain.config.keys import tables

ROOT = Path(__file__).parents[3]
TABLES = {table.name: table for table in tables()}


def key(table, name):
    (found,) = (key for key in TABLES[table].keys if key.name == name)
    return found


def test_the_page_has_every_table_and_links_to_documents(capsys):
    assert main(["keys", "--markdown"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("# The job file\n")
    assert all(f"### {table.header}\n" in page for table in TABLES.values())
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert links and all((ROOT / "docs" / name).exists() for name in links)


def test_every_key_is_described_and_nothing_else():
    classes = {field.name: field.type for field in msgspec.structs.fields(Config)}
    classes["optim.groups"] = Group
    assert classes.keys() == TABLES.keys()
    for name, kind in classes.items():
        fields = [field.name for field in msgspec.structs.fields(kind)]
        assert [key.name for key in TABLES[name].keys] == fields
        listed = cleandoc(kind.__doc__).partition("\nAttributes:\n")[2]
        told = re.findall(r"^    (\w[\w, ]*):", listed, re.MULTILINE)
        assert sorted(n for names in told for n in names.split(", ")) == sorted(fields)
        assert all(key.text and key.values for key in TABLES[name].keys)


@pytest.mark.parametrize(
    ("place", "default", "values"),
    [
        ("run.device", '"cpu"', '"cpu", "cuda" or "auto"'),
        ("optim.epsilon", "1e-8", "number above 0"),
        ("optim.momentum", "0.9", "number from 0, below 1"),
        ("optim.groups.names", "", "list of texts"),
        ("data.workers", "0", "whole number from 0 to 256"),
        ("parallel.links", "[]", "list of numbers above 0"),
        ("parallel.overlap", "true", "true or false"),
        ("parallel.partition", '"even"', '"even", "auto" or list of whole numbers from 1 on'),
        ("server.bound", "3", 'whole number from -1 on or "none"'),
    ],
)
def test_defaults_and_values_are_in_words(place, default, values):
    table, _, name = place.rpartition(".")
    assert key(table, name)[1:3] == (values, default)


@pytest.mark.parametrize(
    ("name", "printed", "refused"),
    [
        ("optim.lr", ["optim.lr"], ""),
        ("kind", ["model.kind", "sync.kind"], ""),
        ("optm", [], "'optm'; did you mean 'optim'?"),
        ("optim.lrr", [], "'optim.lrr'; did you mean 'optim.lr'?"),
    ],
)
def test_a_key_is_printed_and_one_that_there_is_not_refused(name, printed, refused, capsys):
    assert main(["keys", name]) == (2 if refused else 0)
    told = capsys.readouterr()
    assert [line.partition(" = ")[0] for line in told.out.splitlines()] == printed
    wanted = f"mpitrain: a job file has no table or key {refused}\n" if refused else ""
    assert told.err == wanted


def test_keys_need_no_mpi():
    told = subprocess.run(
        [sys.executable, "-m", "mpitrain", "keys", "[data]"],
        cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "MPI4PY_LIBMPI": "/nowhere/libmpi.so"},
    )  # fmt: skip
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout.startswith('data.name = "digits"')
