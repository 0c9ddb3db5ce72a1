"""Job scripts as they are rendered."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpitrain.commands.arguments import parse
from mpitrain.commands.offline import run
from mpitrain.commands.submit import directives, read_script, render
from mpitrain.config import ConfigError
from mpitrain.config.examples import copy

ROOT = Path(__file__).parents[3]
SCRIPT = """#!/bin/bash
# A comment.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=01:00:00
#SBATCH --requeue
set -euo pipefail
. "${MPITRAIN_HOME:-$SLURM_SUBMIT_DIR}/jobs/launch.sh"
launch "$@"
"""


def test_the_script_that_is_submitted():
    lines = directives(nodes=4, ranks_per_node=8, time="2:00:00", partition="gpu", gpus_per_node=8)
    assert render(
        SCRIPT,
        lines,
        ["a job.toml", "--set", "run.dir=$(rm -rf /)'; x"],
        "/a b/python",
        Path("/its jobs"),
    ) == (
        "#!/bin/bash\n"
        "# A comment.\n"
        "#SBATCH --nodes=4\n"
        "#SBATCH --ntasks-per-node=8\n"
        "#SBATCH --time=2:00:00\n"
        "#SBATCH --requeue\n"
        "#SBATCH --gpus-per-node=8\n"
        "#SBATCH --partition=gpu\n"
        "export MPITRAIN_PYTHON=${MPITRAIN_PYTHON:-'/a b/python'}\n"
        "set -- 'a job.toml' --set 'run.dir=$(rm -rf /)'\"'\"'; x'\n"
        "set -euo pipefail\n"
        ". '/its jobs/launch.sh'\n"
        'launch "$@"\n'
    )


def test_arguments_arrive_as_they_were(tmp_path):
    words = ["a b", "$(touch hurt)", "`touch hurt`", "'", '"', "\\", "*", "--set", "ü"]
    (tmp_path / "launch.sh").write_text("launch() { printf '%s\\n' \"$@\"; }\n")
    script = render(SCRIPT, {}, words, "python", tmp_path)
    done = subprocess.run(
        ["bash"], input=script, capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert done.stdout.splitlines() == words
    assert not (tmp_path / "hurt").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 0}, "--nodes 0: at least 1"),
        ({"time": "two hours"}, "--time 'two hours': expected minutes"),
        ({"partition": "a b"}, "--partition 'a b': a name without spaces"),
        ({"name": "x\n#SBATCH --uid=0"}, "--job-name"),
    ],
)
def test_options_that_are_none(options, message):
    with pytest.raises(ConfigError) as caught:
        directives(**{"nodes": 1, "ranks_per_node": 1, "time": "10", **options})
    assert message in str(caught.value)


def test_a_dry_run_prints_the_real_script(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = str(ROOT / "jobs" / "examples" / "digits.toml")
    argv = ["submit", job, "--nodes", "3", "--ranks-per-node", "2", "--time", "30", "--dry-run"]
    argv += ["--set", "train.epochs=3"]
    assert run(parse(argv)) == 0
    out = capsys.readouterr().out
    assert "#SBATCH --nodes=3\n#SBATCH --ntasks-per-node=2\n#SBATCH --time=30\n" in out
    assert f"set -- {job} --set train.epochs=3\n" in out
    assert f"\n. {ROOT / 'jobs/launch.sh'}\n" in out
    assert f"MPITRAIN_PYTHON:-{sys.executable}" in out
    if shutil.which("shellcheck"):
        subprocess.run(
            ["shellcheck", "-x", "-P", str(ROOT / "jobs"), "-"], input=out, text=True, check=True
        )


def test_a_job_that_cannot_be_is_not_submitted(capsys):
    job = str(ROOT / "jobs" / "examples" / "digits.toml")
    argv = ["submit", job, "--dry-run", "--set", "optim.learning=1"]
    assert run(parse(argv)) == 2
    assert "optim.learning: unknown key" in capsys.readouterr().err


def test_scripts_elsewhere(tmp_path):
    with pytest.raises(ConfigError, match=r"train\.sbatch: No such file or directory; --jobs"):
        read_script(tmp_path)
    (tmp_path / "train.sbatch").write_text(SCRIPT)
    with pytest.raises(ConfigError, match=r"launch\.sh: No such file or directory; --jobs"):
        read_script(tmp_path)


def test_scripts_of_this_folder_come_before_the_packages(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_script(None)[1] == ROOT / "jobs"
    copy(tmp_path)
    own = tmp_path / "jobs"
    (own / "train.sbatch").write_text("mine")
    assert read_script(None) == ("mine", own)


def test_launch_finds_its_sites_from_any_folder(tmp_path):
    """As a job that was submitted: its ranks are started with the site's variables."""
    python = tmp_path / "a python"
    python.write_text('#!/bin/sh\nexec echo $OMPI_MCA_pml "$@"\n')
    (tmp_path / "mpiexec").write_text('#!/bin/sh\nshift 2\nexec "$@"\n')
    for path in (python, tmp_path / "mpiexec"):
        path.chmod(0o755)
    script = render(SCRIPT, {}, ["-m", "x y"], str(python), ROOT / "jobs")
    told = subprocess.run(
        ["bash"], input=script, capture_output=True, text=True, cwd=tmp_path, check=True,
        env={"PATH": "/usr/bin:/bin", "SLURM_NTASKS": "2", "MPITRAIN_SITE": "infiniband_openmpi"},
    )  # fmt: skip
    assert told.stdout.splitlines()[-1] == "ucx -m x y"


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_the_scripts_pass_shellcheck():
    jobs = ROOT / "jobs"
    scripts = [*jobs.glob("*.sh"), *jobs.glob("*.sbatch"), *(jobs / "sites").glob("*.sh")]
    assert len(scripts) >= 9
    subprocess.run(["shellcheck", "-x", "-P", str(jobs), *map(str, scripts)], check=True)


@pytest.mark.parametrize(
    "module", ["mpitrain", "mpitrain.commands.offline", "mpitrain.commands.submit"]
)
def test_what_needs_no_ranks_starts_no_mpi(module):
    code = f"import {module}, sys; print('mpi4py.MPI' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert told.stdout == "False\n", told.stderr


FAKES = {
    # The launchers run what they would start on each rank, once.
    "srun": 'echo "srun $*" >> calls; while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "mpiexec": 'echo "mpiexec $*" >> calls; shift 2; exec "$@"',
    "scontrol": 'echo "scontrol $*" >> calls',
    "apptainer": 'printf "%s|" "$COLLECTIVES_TIMEOUT" "$@" >> calls; echo >> calls\n'
    '[ -z "$ENDS" ] || touch "${@: -1}"\n'
    'exit "$STATUS"',
}


def contained(folder, status, ends, **environment):
    """What jobs/container.sbatch returns, and what it has called, where the ranks end like this."""
    for name, text in FAKES.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    given = {
        "PATH": f"{folder}:/usr/bin:/bin",
        "MPITRAIN_HOME": str(ROOT),
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_NTASKS": "4",
        "STATUS": str(status),
        "ENDS": "yes" if ends else "",
    }
    words = [str(ROOT / "jobs/container.sbatch"), "an image.sif", "a job.toml"]
    done = subprocess.run(["bash", *words], cwd=folder, env=given | environment, timeout=60)
    return done.returncode, (folder / "calls").read_text().splitlines()


def test_a_job_in_a_container_is_that_of_train(tmp_path):
    ended = f"{tmp_path}/.mpitrain-7-0.ended"
    image = f"exec|--bind|{tmp_path}|--pwd|{tmp_path}|an image.sif|python|"
    train = f"-m|mpitrain|train|a job.toml|--resume|--ended|{ended}|"
    status, calls = contained(tmp_path, 0, ends=True)
    assert status == 0 and len(calls) == 2
    assert calls[0].startswith("srun --mpi=pmix --kill-on-bad-exit=1 apptainer exec ")
    assert calls[1] == f"600|{image}{train}"


@pytest.mark.parametrize(
    ("status", "ends", "found", "comes_back"),
    [(75, False, 75, True), (139, False, 139, True), (0, False, 255, True), (1, False, 1, False)],
)
def test_a_job_in_a_container_comes_back(tmp_path, status, ends, found, comes_back):
    given = {"MPITRAIN_LAUNCHER": "mpirun", "SLURM_GPUS_ON_NODE": "2", "COLLECTIVES_TIMEOUT": "9"}
    returned, calls = contained(tmp_path, status, ends, **given)
    assert returned == found
    assert calls[0].startswith("mpiexec -n 4 apptainer exec ")
    assert calls[1].startswith("9|exec|") and "|--nv|an image.sif|" in calls[1]
    assert calls[2:] == (["scontrol requeue 7"] if comes_back else [])
