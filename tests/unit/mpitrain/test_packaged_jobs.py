"""Example jobs by name, and copies of them."""

import re
from pathlib import Path

import pytest

from mpitrain.__main__ import main
from mpitrain.commands.arguments import needs_ranks
from mpitrain.config import ConfigError, load
from mpitrain.config.examples import examples

ROOT = Path(__file__).parents[3]


def test_the_text_of_an_example_is_beside_it_unless_there_is_one_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in examples():
        named = load(Path(name)).data.path
        assert not named or named == str(ROOT / "jobs/examples/license.txt")
    assert load(Path("gpt_data"), ["data.path=mine.txt"]).data.path == "mine.txt"
    Path("license.txt").write_text("another")
    assert load(Path("gpt_data")).data.path == "license.txt"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("digitz", "no file and no example has this name; did you mean 'digits'?"),
        ("zzzz", "there are digits, digits_local, digits_mlp"),
        ("digits.toml", "No such file or directory"),
        ("./other/digits", "No such file or directory"),
        ("", "Is a directory"),
    ],
)
def test_a_name_of_no_job(name, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        load(Path(name))


def test_a_file_comes_first_and_two_meanings_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("digits").mkdir()  # no job
    assert load(Path("digits")).train.epochs == 30
    Path("digits.toml").write_text("[train]\nepochs = 7\n")
    assert load(Path("digits.toml")).train.epochs == 7
    with pytest.raises(ConfigError, match=r"it may mean digits\.toml here or \S+; write"):
        load(Path("digits"))
    Path("digits").rmdir()
    Path("digits").write_text("[train]\nepochs = 8\n")
    assert load(Path("digits")).train.epochs == 8


def test_examples_lists_them_all(capsys):
    assert main(["examples"]) == 0
    told = capsys.readouterr().out
    for name in examples():
        assert f"\n{name} " in f"\n{told}"
    assert "Reads license.txt." in told


def test_init_copies_scripts_and_examples_once(tmp_path, capsys):
    target = tmp_path / "new" / "work"
    assert main(["init", str(target)]) == 0
    copied = {path.relative_to(target / "jobs") for path in (target / "jobs").rglob("*")}
    assert {Path("launch.sh"), Path("sites/ethernet.sh"), Path("examples/digits.toml")} <= copied
    (target / "jobs/launch.sh").write_text("mine")
    assert main(["init", str(target)]) == 2
    assert "is there already" in capsys.readouterr().err
    (tmp_path / "file").write_text("mine")
    assert main(["init", f"{tmp_path}/file"]) == 2
    told = capsys.readouterr().err
    assert "file/jobs: Not a directory; name another file or folder" in told and "Errno" not in told
    assert (target / "jobs/launch.sh").read_text() == "mine"


def test_which_commands_start_mpi():
    for words in ("train x", "-v train x"):
        assert needs_ranks(words.split())
    for words in ("--version", "-v plan train", ""):
        assert not needs_ranks(words.split())
