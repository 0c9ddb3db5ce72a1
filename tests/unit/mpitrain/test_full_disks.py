"""Files for which there is no room: what was there stays, and a sentence names it."""

import resource
import sys

import pytest

from mpitrain.commands.arguments import parse
from mpitrain.commands.offline import run
from mpitrain.config import Config, Run
from mpitrain.metrics import recorder
from mpitrain.metrics.records import Start, Step
from mpitrain.pipeline.profiles import LayerProfile, write_profile


@pytest.fixture
def full(monkeypatch):
    """A file ends after 500 bytes."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))

    yield fill
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


#: Commands, and the file that each writes.
COMMANDS = [
    (["report", "{folder}"], "report.html"),
]


@pytest.mark.parametrize(("words", "name"), COMMANDS)
def test_a_command_leaves_what_was_there(tmp_path, capsys, full, words, name):
    with recorder(Config(run=Run(dir=str(tmp_path))), steps=1) as write:
        write(Start(1, ["a:1"], "data 1", [["a"]], "ring", "asked", 7, {}))
        write(Step(1, 0, 8, 1.0, 0.5, 0.1, 0.25, 32.0, 0.2, 0.3))
    (tmp_path / name).write_text("before")
    options = parse([word.format(folder=tmp_path) for word in words])
    full()
    assert run(options) == 2
    assert (tmp_path / name).read_text() == "before"
    assert f"mpitrain: {tmp_path / name}: File too large; name" in capsys.readouterr().err


def test_a_profile_is_whole_or_the_one_that_was_there(tmp_path, full):
    path = tmp_path / "costs.json"
    path.write_text("before")
    full()
    with pytest.raises(OSError, match=r"costs\.json"):
        write_profile(path, [LayerProfile(f"layer{n}", 0.0, 0.0, 0, 0) for n in range(99)])
    assert path.read_text() == "before"


def test_examples_that_are_not_copied_leave_nothing(tmp_path, capsys, full):
    full()
    assert run(parse(["init", str(tmp_path)])) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"mpitrain: {tmp_path}/jobs cannot be written: [Errno 27] File too")
    assert told.count("\n") == 1
    assert not (tmp_path / "jobs").exists()
