"""The programs of examples/, started as their docstrings say."""

import re
from importlib.util import find_spec

import pytest

from tests.launch import programs
from tests.launch.programs import ROOT, needs_digits, needs_launcher, needs_torch

OWN = ROOT / "examples" / "own_algorithm.py"
SCRIPTS = ROOT / "examples" / "pytorch"
TRAINING = ("ddp", "fsdp2", "tensor_parallel", "huggingface")
#: Numbers printed by two modules in turn with second derivatives, and by a loss of all ranks.
EXACT = {"gan": 11, "contrastive": 5}
pytestmark = needs_launcher


def run(folder, ranks, *arguments):
    done = programs.run(folder, *arguments, ranks=ranks, seconds=300)
    assert done.returncode == 0, done.stderr
    warned = [line for line in done.stderr.splitlines() if "Warning" in line]
    # torch warns of what torch and accelerate call, on Gloo, too.
    assert all("/torch/" in line or "reducer.cpp" in line for line in warned), done.stderr
    return done.stdout


def example(folder, name, ranks=2):
    return run(folder, ranks, ROOT / "examples" / f"{name}.py")


def test_every_example_is_run_here():
    tested = {"allreduce", "halo", "own_algorithm", "own_data", "pipeline", "transformer"}
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == tested
    assert {path.stem for path in SCRIPTS.glob("*.py")} == {*TRAINING, "checkpoint", *EXACT}


def test_allreduce(tmp_path):
    lines = example(tmp_path, "allreduce").splitlines()
    ways = ["auto", "by name", "a plan, ten times", "nonblocking", "loads and stores"]
    assert [line.partition(":")[0] for line in lines] == ways


def test_an_unchanged_program_has_the_same_digits(tmp_path):
    plain = example(tmp_path, "halo")
    assert plain.count("\n") == 4
    program = ROOT / "examples" / "halo.py"
    assert run(tmp_path, 2, "-m", "collectives", "run", "--profile", program) == plain
    assert run(tmp_path, None, "-m", "collectives.virtual", "-n", "2", program) == plain


def test_own_algorithm(tmp_path):
    told = example(tmp_path, "own_algorithm")
    for memory in ("messages", "shared"):
        assert f"{memory}: both_ways in 2 overlapping segments on 2 ranks is right" in told


@pytest.mark.slow
def test_own_algorithm_is_measured(tmp_path):
    flags = ["-e", "1K", "-n", "2", "--repeats", "1", "-J", "own.json"]
    told = run(tmp_path, 2, "-m", "collectives", "bench", "allreduce", "--algorithm", OWN, *flags)
    rows = [line.split() for line in told.splitlines() if " both_ways " in f" {line} "]
    assert len(rows) >= 2, told
    assert '"both_ways"' in (tmp_path / "own.json").read_text()


def losses(told):
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", told)]


def over_mpi(folder, ranks, name, *arguments):
    return run(folder, ranks, "-m", "collectives.torch", SCRIPTS / f"{name}.py", *arguments)


def with_gloo(folder, ranks, name, *arguments):
    """Output of a script with Gloo, started by torchrun, which aborts at its end now and then."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    words = [*torchrun, SCRIPTS / f"{name}.py", *arguments, "--backend", "gloo"]
    for _ in range(10):
        done = programs.run(folder, *words, ranks=None, seconds=300)
        if "SIGABRT" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@needs_torch
@pytest.mark.parametrize("name", TRAINING)
def test_scripts_for_torch_have_the_losses_of_gloo(tmp_path, name):
    if name == "huggingface":
        pytest.importorskip("transformers")
        pytest.importorskip("accelerate")
    ours = losses(over_mpi(tmp_path, 2, name))
    assert len(ours) >= 4 and ours[-1] < ours[0]
    assert ours == pytest.approx(losses(with_gloo(tmp_path, 2, name)), rel=1e-5)


@pytest.mark.slow
@needs_torch
@pytest.mark.parametrize("name", EXACT)
def test_a_script_has_the_losses_of_one_process(tmp_path, name):
    def numbers(told):
        return [float(number) for number in re.findall(r"-?\d+\.\d{12}", told)]

    alone = numbers(over_mpi(tmp_path, 1, name))
    assert len(alone) == EXACT[name] == len(set(alone))
    for ranks in (2, 3):
        assert numbers(over_mpi(tmp_path, ranks, name)) == pytest.approx(alone, rel=1e-10)
    if name == "gan":  # at the end of the other, torch's loop of Gloo may wait for the GIL for ever
        assert numbers(with_gloo(tmp_path, 2, name)) == pytest.approx(alone, rel=1e-10)


@pytest.mark.slow
@needs_torch
def test_a_checkpoint_of_four_ranks_goes_on_on_two(tmp_path):
    (saved,) = losses(over_mpi(tmp_path, 4, "checkpoint", "save", "saved"))
    for way in (over_mpi, with_gloo):
        (loaded,) = losses(way(tmp_path, 2, "checkpoint", "load", "saved"))
        assert loaded == pytest.approx(saved, rel=1e-5)


@pytest.mark.slow
@needs_torch
def test_own_data(tmp_path):
    program = ROOT / "examples" / "own_data.py"
    # Ranks, and processes of each that read ahead.
    last = {run(tmp_path, *case).splitlines()[-1] for case in ((1, program, 0), (2, program, 2))}
    assert len(last) == 1 and re.fullmatch(r"final loss 0\.00\d+", *last)


@pytest.mark.slow
@needs_digits
def test_pipeline(tmp_path):
    told = example(tmp_path, "pipeline")
    assert re.findall(r"rank (\d) has \w", told) == ["0", "1"]
    assert float(re.findall(r"test accuracy ([\d.]+)%", told)[-1]) > 80
    assert (tmp_path / "runs" / "pipeline" / "metrics.jsonl").exists()


@pytest.mark.slow
@needs_torch
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_transformer(tmp_path):
    program = ROOT / "examples" / "transformer.py"
    told = [run(tmp_path, 2, program, *given) for given in ((), ('{"pipe": 2}',))]
    data, pipe = ([*map(float, re.findall(r"^ +\d+ +([\d.]+) ", text, re.M))] for text in told)
    assert len(data) == 16 and data[-1] < data[0] / 2
    assert pipe == pytest.approx(data, rel=1e-3)
