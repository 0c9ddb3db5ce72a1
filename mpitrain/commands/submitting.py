"""The command ``submit``: its options, and the request and the words that they make."""

import argparse
import os
import sys
from dataclasses import fields
from pathlib import Path

from collectives.commands import count
from mpitrain.commands import submit as scripts
from mpitrain.config import ConfigError, load

#: Variables of the job that this shell is in, if it is in one.
_OF_A_JOB = ("MPITRAIN_RESTART", "MPITRAIN_ARGUMENTS")


def add(submit: argparse.ArgumentParser) -> None:
    """The options; those for the scheduler have the names of its ``Request``."""
    submit.description = (
        "Write a job script that needs no other file and give it to SLURM or PBS.  CONFIG is a "
        "job file, an example or a program (train.py), whose arguments stand behind --; without "
        "CONFIG, -m MODULE stands last, with its arguments.  Variables MPITRAIN_... and "
        "COLLECTIVES_... of this shell are written into the script, too."
    )
    submit.epilog = (
        "examples: %(prog)s digits --nodes 4 --ranks-per-node 4 --time 2:00:00 --dry-run; "
        "%(prog)s train.py --scheduler pbs --site aurora -- --epochs 3; "
        "%(prog)s --nodes 4 -m collectives.torch ddp.py --epochs 3"
    )
    add = submit.add_argument
    run_as = "run a module as Python's -m does; all words behind it are the module's"
    add("-m", dest="run_as", nargs=argparse.REMAINDER, default=[], metavar="MODULE", help=run_as)
    add("--scheduler", choices=tuple(scripts.SCHEDULERS), help="the scheduler (slurm)")
    add("--nodes", type=int, help="nodes (2)")
    add("--ranks-per-node", type=int, help="ranks on each node (2)")
    add("--cpus-per-task", type=int, help="cores of each rank")
    add("--gpus-per-node", type=int, help="GPUs on each node (0)")
    add("--mem", help="memory of each node, as 64G")
    add("--time", help="time limit in SLURM's form (01:00:00)")
    add("--partition", "--queue", help="SLURM's partition, PBS's queue")
    add("--account", help="the account or project that pays")
    add("--qos", help="SLURM's quality of service")
    add("--constraint", help="SLURM: features of nodes; PBS: resources of a chunk, system=polaris")
    add("--exclusive", action="store_true", help="no other job on these nodes")
    add("--name", help="name of the job")
    add(
        "--directive", action="append", metavar="OPTION",
        help="one more option of #SBATCH (reservation=x) or #PBS (filesystems=home, '-W x=y'); "
        "may be given several times",
    )  # fmt: skip
    add("--site", help="settings of a network: a file of jobs/sites/, as slingshot_mpich")
    add(
        "--launcher",
        choices=scripts.LAUNCHERS,
        help="how ranks are started (mpirun, or the site's)",
    )
    add("--launch-options", metavar="WORDS", help="more options of the launcher, quoted")
    add("--wrap", metavar="WORDS", help="a command before each rank's python, quoted")
    add("--python", help="the interpreter of the ranks (the one of this command)")
    add("--image", help="an Apptainer image, whose python runs")
    add("--module", action="append", default=[], help="a module to load; several times for more")
    add(
        "--before", action="append", default=[], metavar="LINE",
        help="a line of bash to run behind the modules; several times for more",
    )  # fmt: skip
    back = "times that the job is queued again (20; a program: 0, as it must resume by itself, and "
    back += "handle SIGUSR1, which it gets two minutes before the limit unless this is 0)"
    add("--restarts", type=count, help=back)
    add(
        "--jobs", type=Path,
        help="folder of the scripts (jobs/ here if it has train.sbatch, else the package's own)",
    )  # fmt: skip
    defaults = {field.name: field.default for field in fields(scripts.JobRequest)}
    submit.set_defaults(**defaults | {"directive": []})
    add("--dry-run", action="store_true", help="print the script instead of submitting it")


def run(options: argparse.Namespace) -> str:
    """The script of a job, or the scheduler's answer to it.

    Raises:
        ConfigError: the job, the request or an option is wrong, or the scheduler refuses.
    """
    asked = scripts.JobRequest(
        **{f.name: getattr(options, f.name) for f in fields(scripts.JobRequest)}
    )
    script = scripts.render(
        scripts.read_scripts(options.jobs), asked, _words(options), settings=_settings(options),
        modules=options.module, before=options.before,
    )  # fmt: skip
    if told := _of_gpus(options):
        print(f"mpitrain: {told}", file=sys.stderr)
    return script if options.dry_run else scripts.submit(script, asked.scheduler)


def _of_gpus(options: argparse.Namespace) -> str:
    """A warning where GPUs that are asked for may idle, or a job finds none; empty: none."""
    given = (*options.directive, options.launch_options, options.constraint, options.partition)
    asks = options.gpus_per_node > 0 or "gpu" in " ".join(filter(None, given)).lower()
    job = load(options.config, options.set + options.set_behind) if _is_job(options) else None
    told = {
        (True, "cpu"): "GPUs are asked for, and idle: run.device = 'cpu'; --set run.device=cuda",
        (True, ""): "GPUs are asked for; mpitrain.Trainer uses them with device='cuda' alone",
        (False, "cuda"): "run.device = 'cuda', and no GPUs are asked for; see --gpus-per-node",
    }
    return told.get((asks, job.run.device if job else ""), "")


def _is_job(options: argparse.Namespace) -> bool:
    """Whether ``CONFIG`` is a job, and no program."""
    return options.config is not None and options.config.suffix != ".py"


def _words(options: argparse.Namespace) -> list[str]:
    """The words that ``jobs/again.sh`` runs: a job file, a program, or the words behind ``--``."""
    behind = [*(["-m"] if options.run_as else ()), *options.run_as, *options.behind]
    if options.config is not None and options.run_as:
        raise ConfigError(f"{options.config} and -m {options.run_as[0]}: give one of both")
    if options.config is None and behind:
        if behind[0] != "-m" or not behind[1:]:
            raise ConfigError(f"-- {behind[0]}: give the program before --, or -m MODULE")
        return behind
    if options.config is None:
        raise ConfigError("submit needs a job file or a program; mpitrain submit --help")
    # A path forgets the "./" without which a name such as -x.toml would be an option.
    given = str(options.config)
    named = f"./{given}" if given.startswith("-") else given
    if _is_job(options):
        # An impossible job is refused here, before it waits in a queue.
        job = load(options.config, options.set + options.set_behind)
        ranks = options.nodes * options.ranks_per_node
        if (needed := job.needed(ranks)) != ranks:
            raise ConfigError(
                f"--nodes {options.nodes} with --ranks-per-node {options.ranks_per_node}: the "
                f"job's layout needs {needed} ranks, not {ranks}; start as many, or change its "
                "axes, as by --set parallel.pipe=2"
            )
        return [named, *(p for s in options.set for p in ("--set", s)), *behind]
    if options.set:
        raise ConfigError(f"--set: {options.config} is no job file; its arguments stand behind --")
    options.config.read_bytes()
    return [named, *behind]


def _settings(options: argparse.Namespace) -> dict[str, str]:
    """The variables of this shell that a job reads, and the options that stand for some of them."""
    found = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("MPITRAIN_", "COLLECTIVES_"))
        and name.isidentifier()
        and name.isascii()
        and name not in _OF_A_JOB
    }
    given = {
        "MPITRAIN_PYTHON": options.python,
        "MPITRAIN_SITE": options.site,
        "MPITRAIN_LAUNCHER": options.launcher,
        "MPITRAIN_LAUNCH_OPTIONS": options.launch_options,
        "MPITRAIN_WRAP": options.wrap,
        "MPITRAIN_IMAGE": options.image,
        "MPITRAIN_MAX_RESTARTS": options.restarts,
    }
    chosen = {name: str(value) for name, value in given.items() if value is not None}
    restarts = "20" if _is_job(options) else "0"
    usual = {"MPITRAIN_PYTHON": sys.executable, "MPITRAIN_MAX_RESTARTS": restarts}
    return usual | found | chosen
