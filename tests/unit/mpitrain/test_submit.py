"""Job scripts as they are rendered."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpitrain.commands.arguments import parse
from mpitrain.commands.offline import run
from mpitrain.commands.submit import JobRequest, read_scripts, render, seconds
from mpitrain.commands.submit import directives as directives_of
from mpitrain.config import ConfigError
from mpitrain.config.examples import copy
from tests.documents import commands as commands_of

ROOT = Path(__file__).parents[3]
FILES = {
    "train.sbatch": """#!/bin/bash
# A comment.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=01:00:00
#SBATCH --requeue
set -euo pipefail
# shellcheck source=launch.sh
. "${MPITRAIN_HOME:-$SLURM_SUBMIT_DIR}/jobs/launch.sh"
launch "$@"
""",
    "launch.sh": """# shellcheck shell=bash
# shellcheck source=/dev/null
[ -z "${MPITRAIN_SITE:-}" ] || . "$(dirname "${BASH_SOURCE[0]}")/sites/$MPITRAIN_SITE.sh"
launch() { printf '%s\\n' "$@"; }
""",
    "sites/here.sh": "# shellcheck shell=bash\nexport FAST=${FAST:-yes}\n",
}
PBS = {**FILES, "train.pbs": (ROOT / "jobs/train.pbs").read_text(), "again.sh": "", "pbs.sh": ""}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """The folder of a test, with a program in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()


def test_the_script_that_is_submitted():
    asked = JobRequest(
        nodes=4, ranks_per_node=8, time="2:00:00", partition="gpu", gpus_per_node=8, qos="high",
        mem="64g", cpus_per_task=4, constraint="a100&nvme", exclusive=True,
        directive=["reservation=x", "--mail-type=END"],
    )  # fmt: skip
    settings = {"MPITRAIN_SITE": "here", "MPITRAIN_PYTHON": "/a b/python"}
    words = ["a job.toml", "--set", "run.dir=$(rm -rf /)'; x"]
    more = {"settings": settings, "modules": ["gcc/12"], "before": ["ulimit -c 0"]}
    assert render(FILES, asked, words, **more) == (
        "#!/bin/bash\n"
        "# Written by mpitrain submit; what it needs of jobs/ is in it.\n"
        "#SBATCH --nodes=4\n"
        "#SBATCH --ntasks-per-node=8\n"
        "#SBATCH --time=2:00:00\n"
        "#SBATCH --requeue\n"
        "#SBATCH --gpus-per-node=8\n"
        "#SBATCH --partition=gpu\n"
        "#SBATCH --qos=high\n"
        "#SBATCH --constraint=a100&nvme\n"
        "#SBATCH --mem=64G\n"
        "#SBATCH --cpus-per-task=4\n"
        "#SBATCH --exclusive\n"
        "#SBATCH --reservation=x\n"
        "#SBATCH --mail-type=END\n"
        "command -v module >/dev/null || . /etc/profile\n"
        "module load gcc/12 || exit 2\n"
        "set -e\nulimit -c 0\n"
        "export MPITRAIN_PYTHON='/a b/python'\n"
        "set -- 'a job.toml' --set 'run.dir=$(rm -rf /)'\"'\"'; x'\n"
        "set -euo pipefail\n\n"
        "export FAST=${FAST:-yes}\n"
        "launch() { printf '%s\\n' \"$@\"; }\n"
        'launch "$@"\n'
    )


def test_the_lines_for_pbs_are_those_of_its_manual():
    asked = JobRequest(
        scheduler="pbs", nodes=4, ranks_per_node=8, time="1-2", partition="prod", account="P",
        gpus_per_node=4, mem="64G", cpus_per_task=2, constraint="system=polaris", name="run1",
        directive=["filesystems=home:eagle", "-W group_list=x"], exclusive=True,
    )  # fmt: skip
    made = render(PBS, asked, [], settings={}, before=["ulimit -c 0"])
    assert 'cd "$PBS_O_WORKDIR" || exit 2\nset -e\nulimit -c 0\n' in made
    lines = [line for line in made.splitlines() if "#PBS" in line]
    assert lines == [
        "#PBS -N run1",
        "#PBS -l select=4:ncpus=16:mpiprocs=8:ompthreads=2:ngpus=4:mem=64gb:system=polaris",
        "#PBS -l place=scatter:excl",
        "#PBS -l walltime=26:00:00",
        "#PBS -j oe",
        "#PBS -r y",
        "#PBS -q prod",
        "#PBS -A P",
        "#PBS -l filesystems=home:eagle",
        "#PBS -W group_list=x",
    ]


@pytest.mark.parametrize(
    ("time", "expected"),
    [("30", 1800), ("1440", 86400), ("90:30", 5430), ("2:00:00", 7200), ("1-0", 86400),
     ("1-2:30", 95400), ("0-0:0:5", 5)],
)  # fmt: skip
def test_times_are_read_as_slurm_reads_them(time, expected):
    assert seconds(time) == expected


def test_arguments_arrive_as_they_were(tmp_path):
    words = ["a b", "$(touch hurt)", "`touch hurt`", "'", '"', "\\", "*", "--set", "ü"]
    script = render(FILES, JobRequest(), words, settings={"MPITRAIN_IMAGE": "$(touch hurt) 'x"})
    done = subprocess.run(["bash"], input=script, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == words
    assert not (tmp_path / "hurt").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 0}, "--nodes 0: at least 1"),
        ({"nodes": 2**16, "ranks_per_node": 2**16}, "MPI counts at most 2147483647 ranks"),
        ({"gpus_per_node": -1}, "--gpus-per-node -1: at least 0"),
        ({"time": "two hours"}, "--time 'two hours': expected minutes"),
        ({"time": "0"}, "--time 0: a limit of 0 seconds is none"),
        ({"time": "9" * 30}, "is none; give the job's time"),
        ({"partition": "a b"}, "--partition 'a b': a name without spaces"),
        ({"account": "x\n#SBATCH --uid=0"}, "--account"),
        ({"name": "x\n#SBATCH --uid=0"}, "--name"),
        ({"mem": "lots"}, "--mem 'lots': expected memory of a node"),
        ({"directive": ["a=b\n#SBATCH --uid=0"]}, "one option in one line"),
        ({"directive": ["--"]}, "one option in one line"),
        ({"directive": ["nodes=3"]}, "another option of submit says that already"),
        ({"scheduler": "pbs", "directive": ["select=3"]}, "another option of submit says that"),
        ({"scheduler": "pbs", "qos": "high"}, "PBS has queues instead"),
        ({"scheduler": "pbs", "name": "1x"}, "PBS wants a letter"),
    ],
)
def test_requests_that_are_none(options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        directives_of(JobRequest(**options))


def shown(capsys, *words):
    """Output of ``submit --dry-run``."""
    assert run(parse(["submit", "--dry-run", *words])) == 0
    return capsys.readouterr().out


def test_a_dry_run_prints_the_real_script(capsys, monkeypatch):
    monkeypatch.setenv("MPITRAIN_LAUNCHER", "pmix")
    monkeypatch.setenv("MPITRAIN_RESTART", "3")
    job = str(ROOT / "jobs" / "examples" / "digits.toml")
    argv = ["--nodes", "3", "--ranks-per-node", "2", "--time", "30", "--set", "train.epochs=3"]
    out = shown(capsys, job, *argv)
    assert "#SBATCH --nodes=3\n#SBATCH --ntasks-per-node=2\n#SBATCH --time=30\n" in out
    assert f"set -- {job} --set train.epochs=3\n" in out
    assert f"export MPITRAIN_PYTHON={sys.executable}\n" in out
    assert "export MPITRAIN_LAUNCHER=pmix\n" in out and "RESTART=3" not in out
    assert str(ROOT / "jobs/launch.sh") not in out and "\n. " not in out
    assert "#SBATCH --signal=B:USR1@120\n" in out
    assert "#SBATCH --signal=B:USR1@60\n" in shown(capsys, job, "--time", "2")
    own = shown(capsys, job, "--time", "2", "--directive", "signal=B:USR1@30")
    assert "#SBATCH --signal=B:USR1@30\n" in own and "@60" not in own
    assert out.count("\n") <= 131 and not re.search("PBS|PJM|apptainer", out)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("train.py -- --nodes 'a b'", "train.py --nodes 'a b'"),
        ("-- -m collectives tune", "-m collectives tune"),
        ("--nodes 3 -m collectives.torch train.py --nodes 9",
         "-m collectives.torch train.py --nodes 9"),
        ("digits --set optim.lr=1 -- --grace 5", "digits --set optim.lr=1 --grace 5"),
        ("gpt_3d --ranks-per-node 4", "gpt_3d"),
        ("gpt_3d --ranks-per-node 3 --set parallel.pipe=3", "gpt_3d --set parallel.pipe=3"),
    ],
)  # fmt: skip
def test_a_program_and_its_arguments(capsys, words, found):
    assert f"\nset -- {found}\n" in shown(capsys, *shlex.split(words))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("no.py", "no.py: No such file"),
        ("train.py --set a=1", "train.py is no job file"),
        ("", "needs a job file or a program"),
        ("-- train.py", "give the program before --"),
        ("-- -c x", "give the program before --"),
        ("-- -m", "or -m MODULE"),
        ("digits -m collectives.torch", "give one of both"),
        ("digits -- --set optim.rate=1", "optim.rate: unknown key"),
        ("gpt_3d --dry-run --ranks-per-node 3", "the job's layout needs 4 ranks, not 6"),
    ],
)
def test_what_cannot_be_submitted(capsys, words, message):
    assert run(parse(["submit", *words.split()])) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
def test_only_what_is_said_to_resume_comes_back(capsys, scheduler):
    never, again = {"slurm": ("--no-requeue", "--requeue"), "pbs": ("-r n", "-r y")}[scheduler]
    for words, line in (
        (["digits"], again),
        (["digits", "--restarts", "0"], never),
        (["train.py"], never),
        (["train.py", "--restarts", "3"], again),
        (["--", "-m", "collectives", "tune"], never),
    ):
        found = shown(capsys, "--scheduler", scheduler, *words).splitlines()
        lines = [one for one in found if one.endswith((f" {never}", f" {again}"))]
        assert len(lines) == 1 and lines[0].endswith(f" {line}")
        assert ("export MPITRAIN_MAX_RESTARTS=0" in found) == (line == never)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["digits", "--gpus-per-node", "4"], "and idle: run.device = 'cpu'"),
        (["digits", "--gpus-per-node", "4", "--set", "run.device=cuda"], ""),
        (["digits", "--set", "run.device=cuda"], "no GPUs are asked for"),
        (["digits", "--set", "run.device=cuda", "--directive", "gres=gpu:4"], ""),
        (["train.py", "--gpus-per-node", "4"], "with device='cuda' alone"),
        (["train.py"], ""),
    ],
)
def test_gpus_that_would_idle_are_told_of(capsys, words, told):
    assert run(parse(["submit", "--dry-run", *words])) == 0
    err = capsys.readouterr().err
    assert told in err and bool(told) == bool(err)


def test_names_of_files_arrive_as_they_are(capsys, monkeypatch):
    """Names that look like options, and bytes that are no text."""
    for name in ("-m.py", "-x.toml"):
        Path(name).write_text("")
        assert f"\nset -- ./{name}\n" in shown(capsys, f"./{name}")
    Path("sbatch").write_text("#!/bin/sh\ncat > script; echo job 1")
    Path("sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", ".", prepend=os.pathsep)
    name = os.fsdecode(b"- \xff'.py")
    Path(name).write_text("")
    assert run(parse(["submit", f"./{name}"])) == 0
    assert capsys.readouterr().out == "job 1\n"
    assert os.fsencode(shlex.quote(f"./{name}")) in Path("script").read_bytes()


LINES = [words for words in commands_of(ROOT / "docs/sites.md") if "submit" in words[:-1]]


@pytest.mark.parametrize("words", LINES, ids=lambda words: " ".join(words)[:60])
def test_the_lines_of_sites_make_scripts(words, capsys, monkeypatch):
    monkeypatch.setenv("MPITRAIN_NETWORK", "10.0.0.0/16")
    Path("job.toml").write_text("")
    out = shown(capsys, *words[words.index("submit") + 1 :])
    assert ("\n#PBS -l select=" if "pbs" in words else "\n#SBATCH --nodes=") in out


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_scripts_pass_shellcheck():
    """Scripts that are generated, and those of jobs/."""
    jobs = ROOT / "jobs"
    for scheduler in ("slurm", "pbs"):
        settings = {"MPITRAIN_SITE": "slingshot_mpich", "MPITRAIN_IMAGE": "'"}
        asked = JobRequest(scheduler=scheduler, directive=["-V"])
        text = render(read_scripts(jobs), asked, ["a b"], settings=settings, modules=["a"])
        Path(scheduler).write_text(text)
    found = [path for end in ("sh", "sbatch", "pbs", "pjm") for path in jobs.rglob(f"*.{end}")]
    assert len(found) >= 14
    for words in (["-e", "SC1091", "slurm", "pbs"], ["-x", "-P", jobs, *found]):
        told = subprocess.run(["shellcheck", *words], capture_output=True, text=True)
        assert told.returncode == 0, told.stdout


def test_scripts_of_this_folder_come_before_the_packages(tmp_path):
    assert read_scripts(None) == read_scripts(ROOT / "jobs")
    copy(tmp_path)
    (tmp_path / "jobs" / "train.sbatch").write_text("mine")
    assert read_scripts(None)["train.sbatch"] == "mine"


def stand_ins(folder, **texts):
    """Launchers, and a python, that say how they are called, or do as the ``texts`` for bash; the
    path to them."""
    texts = {name: f'echo {name} "$@"' for name in ("mpiexec", "srun", "qstat")} | texts
    for name, text in ({"python": "exec env"} | texts).items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def bash(folder, text, **env):
    words = ["bash", "-euo", "pipefail", "-c", text]
    return subprocess.run(words, env=env, cwd=folder, capture_output=True, text=True)


SLURM = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_SUBMIT_DIR": "/",
         "SLURM_JOB_NODELIST": "n[1-2]"}  # fmt: skip
NODES = "a\na\nb\nb\n"
UNEVEN = "a\na\na\nb\nb\n"


def of_pbs(folder, nodes=NODES):
    """Variables of a job of PBS on these nodes."""
    (folder / "nodes").write_text(nodes)
    return {"PBS_JOBID": "7.x", "PBS_O_WORKDIR": "/", "PBS_NODEFILE": f"{folder}/nodes"}


#: Files that a script of each scheduler reads.
SOURCES = {
    kind: "; ".join(f". {ROOT}/jobs/{name}.sh" for name in (kind, "launch", "again"))
    for kind in ("slurm", "pbs")
} | {"pjm": f". {ROOT}/jobs/train.pjm"}
PALS = "mpiexec -n {} --ppn {} --cpu-bind depth --depth {} python -m x y"


@pytest.mark.parametrize(
    ("scheduler", "given", "expected"),
    [
        ("slurm", {"MPITRAIN_LAUNCHER": "srun"}, "srun --kill-on-bad-exit=1 python -m x y"),
        ("slurm", {"MPITRAIN_SITE": "slingshot_mpich", "MPITRAIN_WRAP": "shifter --image=a"},
         "srun --kill-on-bad-exit=1 shifter --image=a python -m x y"),
        ("slurm", {"MPITRAIN_SITE": "slingshot_openmpi"},
         "srun --mpi=pmix --kill-on-bad-exit=1 --network=disable_rdzv_get python -m x y"),
        ("slurm", {"MPITRAIN_SITE": "infiniband_mpich", "MPITRAIN_LAUNCH_OPTIONS": "--a  b"},
         "srun --mpi=pmi2 --kill-on-bad-exit=1 --a b python -m x y"),
        ("slurm", {}, "mpiexec -n 4 python -m x y"),
        ("slurm", {"MPITRAIN_LAUNCHER": "pals"}, "mpirun, pmix, pmi2 or srun under SLURM"),
        ("pbs", {"MPITRAIN_LAUNCHER": "srun"}, "srun: expected mpirun or pals under PBS"),
        ("pbs", {"MPITRAIN_SITE": "aurora"}, PALS.format(4, 2, 1)),
        ("pbs", {"MPITRAIN_SITE": "slingshot_mpich", "MPITRAIN_LAUNCH_OPTIONS": "--cpu-bind none"},
         "mpiexec -n 4 --ppn 2 --cpu-bind none python -m x y"),
        ("pbs", {"MPITRAIN_SITE": "aurora", "MPITRAIN_RANKS_PER_NODE": "12"},
         PALS.format(24, 12, 1)),
        ("pbs", {"MPITRAIN_SITE": "aurora", "NODES": UNEVEN}, PALS.format(4, 2, 1)),
        ("pbs", {"NODES": UNEVEN}, "mpiexec -n 5 -machinefile {folder}/nodes python -m x y"),
        *(("pbs", {"MPITRAIN_SITE": site, "MPITRAIN_LAUNCHER": "pals", "OMP_NUM_THREADS": "3"},
           PALS.format(4, 2, 3))
          for site in ("infiniband_mpich", "infiniband_openmpi")),
        ("pbs", {}, "mpiexec -n 4 -machinefile {folder}/nodes python -m x y"),
        ("pjm", {}, "mpiexec -n 8 python -m x y"),
    ],
)  # fmt: skip
def test_how_ranks_are_started(scheduler, given, expected, tmp_path):
    """The line of each launcher, from any folder, with the options of the site and the user."""
    own = {"slurm": SLURM, "pjm": {"PJM_JOBID": "7", "PJM_MPI_PROC": "8"}}
    own["pbs"] = of_pbs(tmp_path, given.get("NODES", NODES))
    given = {"MPITRAIN_HOME": str(ROOT), "MPITRAIN_ARGUMENTS": "-m x y"} | given
    env = stand_ins(tmp_path) | given | own[scheduler]
    told = bash(tmp_path, f"{SOURCES[scheduler]}; launch -m x y", **env)
    last = re.sub(r" env .*(?= python)", "", (told.stdout + told.stderr).strip().splitlines()[-1])
    assert last.replace(f"{tmp_path}/mpiexec", "mpiexec").endswith(
        expected.format(folder=tmp_path)
    ), told.stdout + told.stderr


def test_ranks_of_other_nodes_have_the_variables_of_the_script(tmp_path):
    """A launcher over ssh passes nothing on."""
    set_there = {"COLLECTIVES_TIMEOUT": "9", "UCX_TLS": "tcp, self", "FI_PROVIDER": "tcp"}
    set_there |= {"OMP_NUM_THREADS": "2", "LD_LIBRARY_PATH": "/a:/b"}
    env = stand_ins(tmp_path, mpiexec='shift 4; exec env -i "$@"') | set_there | {"HOSTNAME": "a"}
    env |= of_pbs(tmp_path)
    told = bash(tmp_path, f"{SOURCES['pbs']}; launch -u NONE", **env).stdout.splitlines()
    assert {f"{name}={value}" for name, value in set_there.items()} <= {*told}
    assert "HOSTNAME=a" not in told and f"PATH={env['PATH']}" in told


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({}, "nomultithread"),
        ({"SLURM_HINT": "compute_bound"}, "compute_bound"),
        ({"SLURM_CPUS_PER_TASK": "3"}, " 3"),  # threads, as there are not so many cores
        ({"SLURM_CPUS_PER_TASK": "3", "MPITRAIN_LAUNCHER": "mpirun"}, ""),  # its daemons have all
        ({"SLURM_CPUS_ON_NODE": "4"}, ""),  # the others of the node are of another job
        ({"MPITRAIN_LAUNCH_OPTIONS": "--gpus 1 --cpu-bind=none"}, ""),
        ({"MPITRAIN_LAUNCHER": "mpirun"}, ""),
    ],
)
def test_ranks_of_srun_have_cores_and_not_their_threads(given, hint, tmp_path):
    """Two nodes of four cores with two threads each; ranks have the script's variables, too."""
    cpus = "".join(f"{n % 4},0\\n" for n in range(8))
    told = 'echo "hint ${SLURM_HINT:-}${SRUN_CPUS_PER_TASK:+ $SRUN_CPUS_PER_TASK}"'
    hinted = dict.fromkeys(("srun", "mpiexec"), f"{told} $SLURM_EXPORT_ENV")
    env = stand_ins(tmp_path, lscpu=f"printf '# CORE\\n{cpus}'", **hinted)
    env |= {"MPITRAIN_LAUNCHER": "srun", "SLURM_EXPORT_ENV": "NONE"}  # of sbatch --export=NONE
    env |= SLURM | {"SLURM_NNODES": "2", "SLURM_CPUS_ON_NODE": "8"} | given
    told = bash(tmp_path, f"{SOURCES['slurm']}; launch -m x y", **env)
    assert told.stdout.endswith(f"\nhint {hint} ALL\n"), told


FAKES = {
    # The launchers run what they would start on each rank, once.
    "srun": 'echo "srun $*" >> calls; while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "mpiexec": 'echo "mpiexec $*" >> calls; shift 2; exec "$@"',
    "scontrol": 'echo "scontrol $*" >> calls',
    "apptainer": 'printf "%s|" "$COLLECTIVES_TIMEOUT" "$@" >> calls; echo >> calls\n'
    '[ -z "$ENDS" ] || touch "${@: -1}"\n'
    'exit "$STATUS"',
}


def contained(folder, status, ends, job="a job.toml", **environment):
    """Status of jobs/container.sbatch, and its calls, where the ranks end like this."""
    given = {"MPITRAIN_HOME": str(ROOT), "STATUS": str(status), "ENDS": "yes" * ends}
    given |= stand_ins(folder, **FAKES) | SLURM | {"SLURM_SUBMIT_DIR": str(folder)} | environment
    words = ["bash", ROOT / "jobs/container.sbatch", "an image.sif", job]
    done = subprocess.run(words, cwd=folder, env=given, timeout=60)
    return done.returncode, (folder / "calls").read_text().splitlines()


def test_a_job_in_a_container_is_that_of_train(tmp_path):
    ended = f"{tmp_path}/.mpitrain-7-0.ended"
    image = f"exec|--bind|{tmp_path}|--pwd|{tmp_path}|an image.sif|python|"
    train = f"-m|mpitrain|train|a job.toml|--resume|--ended|{ended}|"
    status, calls = contained(tmp_path, 0, ends=True)
    assert status == 0 and len(calls) == 2
    assert calls[0].startswith("srun --mpi=pmix --kill-on-bad-exit=1 apptainer exec ")
    assert calls[1] == f"600|{image}{train}"


@pytest.mark.parametrize(("limit", "expected"), [("0", 0), ("1", 138)])
def test_only_a_program_that_is_said_to_resume_is_told_before_the_limit(tmp_path, limit, expected):
    env = stand_ins(tmp_path, mpiexec="sleep 0.3\nkill -USR1 $PPID\nsleep 1")
    text = f"{SOURCES['slurm']}; queue_again() {{ :; }}; come_back x.py"
    told = bash(tmp_path, text, **env, **SLURM, MPITRAIN_MAX_RESTARTS=limit)
    assert told.returncode == expected, told


@pytest.mark.parametrize("limit", ["x", "9" * 20])
def test_a_limit_of_restarts_that_bash_cannot_compare_is_refused(tmp_path, limit):
    """It would compare as smaller for ever."""
    env = SLURM | {"MPITRAIN_MAX_RESTARTS": limit}
    told = bash(tmp_path, f"{SOURCES['slurm']}; come_back x.toml", **env)
    assert told.returncode == 2 and f"MPITRAIN_MAX_RESTARTS={limit}: a number" in told.stderr


@pytest.mark.parametrize(
    ("job", "limit", "status", "found", "comes_back"),
    [
        ("a job.toml", "", 75, 75, True),
        ("a job.toml", "", 139, 139, True),
        ("a job.toml", "", 0, 255, True),
        ("a job.toml", "", 1, 1, False),
        *(("train.py", "", status, status, False) for status in (75, 139)),
        *(("train.py", "1", status, status, True) for status in (75, 139)),
    ],
)
def test_who_comes_back_in_a_container(tmp_path, job, limit, status, found, comes_back):
    """A program if that is asked for."""
    given = {"MPITRAIN_LAUNCHER": "mpirun", "SLURM_GPUS_ON_NODE": "2", "COLLECTIVES_TIMEOUT": "9"}
    given["MPITRAIN_MAX_RESTARTS"] = limit
    returned, calls = contained(tmp_path, status, False, job, **given)
    assert returned == found
    assert re.match(r"mpiexec -n 4 env .* apptainer exec ", calls[0])
    assert calls[1].startswith("9|exec|") and "|--nv|an image.sif|" in calls[1]
    assert calls[2:] == ["scontrol requeue Incomplete 7"] * comes_back


#: Command of the ranks of a job of PBS, the job's status, and whether it comes back.
ENDS = [
    ("exit 75", 75, True),
    ("exit 139", 139, True),
    ("exit 1", 1, False),
    ("trap 'exit 75' USR1; for _ in {1..200}; do sleep 0.1; done", 75, True),  # told in time
    ("trap 'exit 75' USR1; kill $PPID; for _ in {1..200}; do sleep 0.1; done", 75, False),  # qdel
]


@pytest.mark.parametrize(("end", "status", "comes_back"), ENDS)
def test_a_job_of_pbs_comes_back(tmp_path, end, status, comes_back):
    """The script of jobs/, whose commands are stand-ins; ranks that wait are told in time."""
    walltime = "0:0:6" if "USR1" in end else "1:0:0"
    fakes = {
        "mpiexec": f'echo "mpiexec $*" >> calls; {end}',
        "qstat": f"echo ' Resource_List.walltime = {walltime}'",
        "qsub": 'echo "qsub $*" >> calls',
        "python": "",
    }
    given = stand_ins(tmp_path, **fakes) | of_pbs(tmp_path) | {"PBS_O_WORKDIR": str(tmp_path)}
    given |= {"MPITRAIN_HOME": str(ROOT), "MPITRAIN_LAUNCHER": "pals"}
    given["MPITRAIN_ARGUMENTS"] = "job.toml --set a=1"
    done = subprocess.run(["bash", ROOT / "jobs/train.pbs"], env=given, timeout=60)
    assert done.returncode == status
    started, *again = (tmp_path / "calls").read_text().splitlines()
    assert started.startswith("mpiexec -n 4 --ppn 2 --cpu-bind depth --depth 1 python -m mpitrain")
    assert " train job.toml --set a=1 --resume " in started
    assert [line[:36] for line in again] == ["qsub -W depend=afterany:7.x -v COLLE"] * comes_back


@pytest.mark.parametrize(
    ("job", "given", "runs"),
    [
        ("train.py", {}, False),
        ("train.py", {"MPITRAIN_MAX_RESTARTS": "3"}, True),
        ("a job.toml", {}, True),
        ("a job.toml", {"SLURM_RESTART_COUNT": "21"}, False),
    ],
)
def test_what_the_scheduler_starts_again_runs_only_if_it_resumes(tmp_path, job, given, runs):
    """A preemption may queue a job again without asking its script."""
    (tmp_path / "calls").touch()
    given = {"MPITRAIN_LAUNCHER": "mpirun", "SLURM_RESTART_COUNT": "1"} | given
    status, calls = contained(tmp_path, 0, ends=True, job=job, **given)
    assert (status, bool(calls)) == ((0, True) if runs else (1, False))


def test_what_pbs_itself_starts_again_counts_too(tmp_path):
    env = of_pbs(tmp_path) | stand_ins(tmp_path, qstat="echo '    run_count = 2'")
    told = bash(tmp_path, f"{SOURCES['pbs']}; come_back train.py", **env)
    assert told.returncode == 1 and "has started this again" in told.stderr
    assert "restart 1" in told.stdout
