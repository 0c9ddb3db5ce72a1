"""Job scripts for SLURM and PBS that need no other file: from those in jobs/ and a request."""

import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpitrain.config import ConfigError, examples

#: The script that is the pattern, and the command that takes it, by scheduler.
SCHEDULERS = {"slurm": ("train.sbatch", "sbatch"), "pbs": ("train.pbs", "qsub")}
LAUNCHERS = ("mpirun", "pmix", "pmi2", "srun", "pals")
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d{1,2}))?(?::(\d{1,2}))?", re.ASCII)
_NAME = re.compile(r"[\w.,@%+=:/\[\]-]+", re.ASCII)
_CONSTRAINT = re.compile(r"[\w.,@%+=:/\[\]&|()*!-]+", re.ASCII)
_CHUNK = re.compile(r"\w+=[\w.,-]+(:\w+=[\w.,-]+)*", re.ASCII)
_MEMORY = re.compile(r"0|([1-9]\d*)([KMGT])B?", re.IGNORECASE | re.ASCII)
#: Largest number: MPI counts ranks in 32 bits, as schedulers count cores and seconds.
_MOST = 2**31 - 1
#: The output's file has it in its name.
_SLURM_NAME = re.compile(r"[\w.,@+=:-]+", re.ASCII)
#: OpenPBS takes 236 characters, its older versions 230.
_PBS_NAME = re.compile(r"[A-Za-z][\w.+-]{0,229}", re.ASCII)
_WANTED = {
    _NAME: "a name without spaces or quotes is needed",
    _PBS_NAME: "PBS wants a letter, then letters, digits and . _ + -, at most 230",
    _CHUNK: "PBS wants resources of a chunk, as system=polaris, with : between them",
}
#: Lines of the scripts that read another file, some of them only where a variable is set; the text
#: of that file takes their place.
_SOURCE = re.compile(
    r'^(?:\[ -z "\$\{(\w+):-\}" \] \|\| )?\. .*(?:/jobs|"\))/([\w$/-]+\.sh)"\n', re.MULTILINE
)
#: Variables without which the file of a site fails.
_NEEDED = re.compile(r"\$\{(MPITRAIN_\w+):\?")
#: Hints of shellcheck for files that the script no longer reads.
_HINT = re.compile(r"^# shellcheck (?:shell=|source=|disable=SC(?:2034|2154)).*\n", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """The request of a job to its scheduler; checked.

    Attributes:
        scheduler: ``slurm`` or ``pbs``.
        time: limit of the run, as SLURM reads it: minutes, ``hours:minutes:seconds`` or
            ``days-hours``.
        partition: SLURM's partition, PBS's queue.
        qos: SLURM's quality of service.
        mem: memory of each node, as ``64G``.
        cpus_per_task: cores of each rank; ``None``: the scheduler's default, under PBS 1.
        constraint: SLURM's features; under PBS more of each chunk, as ``system=polaris``.
        exclusive: nodes without other jobs.
        directive: further lines of ``#SBATCH`` or ``#PBS``, each without dashes or with them.

    Raises:
        ConfigError: a number, a time or a word is not valid for the scheduler.
    """

    scheduler: str = "slurm"
    nodes: int = 2
    ranks_per_node: int = 2
    time: str = "01:00:00"
    name: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    mem: str | None = None
    gpus_per_node: int = 0
    cpus_per_task: int | None = None
    exclusive: bool = False
    directive: Sequence[str] = ()

    def __post_init__(self) -> None:
        cores = 1 if self.cpus_per_task is None else self.cpus_per_task
        for key, count, least in (
            ("--nodes", self.nodes, 1),
            ("--ranks-per-node", self.ranks_per_node, 1),
            ("--cpus-per-task", cores, 1),
            ("--gpus-per-node", self.gpus_per_node, 0),
        ):
            if not least <= count <= _MOST:
                bound = f"at least {least}" if count < least else f"at most {_MOST}"
                raise ConfigError(f"{key} {count}: {bound} is needed")
        if self.nodes * self.ranks_per_node * cores > _MOST:
            raise ConfigError(
                f"--nodes {self.nodes} with --ranks-per-node {self.ranks_per_node}: MPI counts at "
                f"most {_MOST} ranks, and schedulers as many cores; ask for fewer"
            )
        seconds(self.time)
        pbs = self.scheduler == "pbs"
        for key, word, pattern in (
            ("--name", self.name, _PBS_NAME if pbs else _SLURM_NAME),
            ("--partition", self.partition, _NAME),
            ("--account", self.account, _NAME),
            ("--qos", self.qos, _NAME),
            ("--constraint", self.constraint, _CHUNK if pbs else _CONSTRAINT),
        ):
            if word is not None and not pattern.fullmatch(word):
                raise ConfigError(f"{key} {word!r}: {_WANTED.get(pattern, _WANTED[_NAME])}")
        if self.mem is not None and not _MEMORY.fullmatch(self.mem):
            raise ConfigError(f"--mem {self.mem!r}: expected memory of a node, as 500M or 64G")
        if pbs and self.mem == "0":
            raise ConfigError("--mem 0: PBS has no word for all of a node; take --exclusive")
        if pbs and self.qos is not None:
            raise ConfigError("--qos: PBS has queues instead; name one with --partition")


def seconds(time: str) -> int:
    """A time limit in SLURM's forms.

    Raises:
        ConfigError: it is in none of these forms, or zero, which SLURM reads as no limit.
    """
    found = _TIME.fullmatch(time)
    if not found:
        raise ConfigError(f"--time {time!r}: expected minutes, hours:minutes:seconds or days-hours")
    days, *parts = (None if part is None else int(part) for part in found.groups())
    first, second, third = (0 if part is None else part for part in parts)
    if days is not None:
        total = ((days * 24 + first) * 60 + second) * 60 + third
    elif parts[2] is None:
        total = first * 60 + second
    else:
        total = (first * 60 + second) * 60 + third
    if not 0 < total <= _MOST:
        raise ConfigError(f"--time {time}: a limit of {total} seconds is none; give the job's time")
    return total


def directives(asked: JobRequest) -> dict[str, str]:
    """The lines of ``#SBATCH`` or ``#PBS``: what stands before the value, and the value."""
    lines = _pbs(asked) if asked.scheduler == "pbs" else _slurm(asked)
    for given in asked.directive:
        if not given.strip("- ") or not given.isprintable():
            raise ConfigError(f"--directive {given!r}: one option in one line is needed")
        start, equals, value = _spelt(asked.scheduler, given.strip()).partition("=")
        if start + equals in lines and start != "--signal":  # which only follows from --time
            raise ConfigError(f"--directive {given!r}: another option of submit says that already")
        lines[start + equals] = value
    return lines


def _spelt(scheduler: str, given: str) -> str:
    """With its dashes: under PBS, what has none is a resource of ``-l``."""
    if given.startswith("-"):
        return given
    return f"-l {given}" if scheduler == "pbs" else f"--{given}"


def _slurm(asked: JobRequest) -> dict[str, str]:
    memory = asked.mem and asked.mem.upper().removesuffix("B")
    limit = seconds(asked.time)
    values = {
        "job-name": asked.name,
        "nodes": asked.nodes,
        "ntasks-per-node": asked.ranks_per_node,
        "time": asked.time,
        "gpus-per-node": asked.gpus_per_node or None,
        "partition": asked.partition,
        "account": asked.account,
        "qos": asked.qos,
        "constraint": asked.constraint,
        "mem": memory,
        "cpus-per-task": asked.cpus_per_task,
        # The pattern's 120 s before the end would be the beginning of a short job.
        "signal": f"B:USR1@{limit // 2}" if limit < 240 else None,
    }
    lines = {f"--{key}=": str(value) for key, value in values.items() if value is not None}
    return lines | ({"--exclusive": ""} if asked.exclusive else {})


def _pbs(asked: JobRequest) -> dict[str, str]:
    cores = asked.cpus_per_task or 1
    # Without ompthreads, PBS sets OMP_NUM_THREADS to the cores of all ranks of a node.
    chunk = f"{asked.nodes}:ncpus={asked.ranks_per_node * cores}"
    chunk += f":mpiprocs={asked.ranks_per_node}:ompthreads={cores}"
    if asked.gpus_per_node:
        chunk += f":ngpus={asked.gpus_per_node}"
    if memory := asked.mem and _MEMORY.fullmatch(asked.mem):
        chunk += f":mem={memory[1]}{memory[2].lower()}b"
    if asked.constraint:
        chunk += f":{asked.constraint}"
    minutes, rest = divmod(seconds(asked.time), 60)
    lines = {
        "-N ": asked.name,
        "-l select=": chunk,
        "-l place=": "scatter:excl" if asked.exclusive else "scatter",
        "-l walltime=": f"{minutes // 60:02}:{minutes % 60:02}:{rest:02}",
        "-q ": asked.partition,
        "-A ": asked.account,
    }
    return {key: value for key, value in lines.items() if value is not None}


def render(
    files: Mapping[str, str],
    asked: JobRequest,
    arguments: Sequence[str],
    *,
    settings: Mapping[str, str],
    modules: Sequence[str] = (),
    before: Sequence[str] = (),
) -> str:
    """The script of a job, which needs no other file; a pure function.

    Args:
        files: contents of the files in ``jobs/`` by name, as ``read_scripts`` returns them.
        arguments: arguments of ``come_back`` in ``again.sh``; they are quoted here and may hold any
            character.
        settings: variables ``MPITRAIN_...`` and ``COLLECTIVES_...`` of the job; the contents of the
            file ``MPITRAIN_SITE`` are written into the script.
        modules: environment modules that the script loads first.
        before: lines of bash that follow them, unchanged, in the folder of the submission; one
            that fails ends the job.

    Raises:
        ConfigError: there is no such site, or a word of the command is not valid.
    """
    pattern = SCHEDULERS[asked.scheduler][0]
    text = _HINT.sub("", _joined(files[pattern], files, settings))
    if settings.get("MPITRAIN_MAX_RESTARTS") == "0":  # the scheduler itself brings it back no more
        text = text.replace("#SBATCH --requeue", "#SBATCH --no-requeue")
        text = text.replace("#PBS -r y", "#PBS -r n")
    sign = "#PBS " if asked.scheduler == "pbs" else "#SBATCH "
    left = dict(directives(asked))
    done = ["#!/bin/bash", "# Written by mpitrain submit; what it needs of jobs/ is in it."]
    shown = text.splitlines()
    begins = next((i for i, line in enumerate(shown) if line.startswith(sign)), None)
    if begins is None:
        raise ConfigError(f"{pattern} has no line {sign.strip()}: --jobs names another folder")
    for line in shown[begins:]:
        start = next((key for key in left if line.startswith(sign + key)), None)
        done.append(line if start is None else f"{sign}{start}{left.pop(start)}")
    last = max(i for i, line in enumerate(done) if line.startswith(sign))
    added = [f"{sign}{start}{value}" for start, value in left.items()]
    exports = dict(settings)
    for name in ("MPITRAIN_WRAP", "MPITRAIN_LAUNCH_OPTIONS"):
        if re.search(r"[\"'\\$`\n]", exports.get(name, "")):
            raise ConfigError(f"{name} {exports[name]!r}: quotes are not read in these words")
    if asked.scheduler == "pbs":
        exports["MPITRAIN_RANKS_PER_NODE"] = str(asked.ranks_per_node)
    exports.pop("MPITRAIN_SITE", None)
    given = [f"export {name}={shlex.quote(value)}" for name, value in sorted(exports.items())]
    begun = ['cd "$PBS_O_WORKDIR" || exit 2'] if asked.scheduler == "pbs" else []
    begun += [*_loads(modules), *(["set -e"] if before else []), *before]
    first = [*begun, *given, f"set -- {shlex.join(arguments)}"]
    return "\n".join([*done[: last + 1], *added, *first, *done[last + 1 :], ""])


def _joined(text: str, files: Mapping[str, str], settings: Mapping[str, str]) -> str:
    """A script with the files that it reads under these settings, and those that they read."""

    def file(found: re.Match[str]) -> str:
        if found[1] and not settings.get(found[1]):
            return ""
        name = found[2].replace("$MPITRAIN_SITE", settings.get("MPITRAIN_SITE", ""))
        if name not in files:
            sites = ", ".join(Path(path).stem for path in files if path.startswith("sites/"))
            fix = f"--site takes {sites}" if found[1] else "--jobs names another folder"
            raise ConfigError(f"jobs/{name}: no such file; {fix}")
        missing = [one for one in _NEEDED.findall(files[name]) if not settings.get(one)]
        if missing:
            raise ConfigError(f"--site {Path(name).stem}: set {missing[0]}, as jobs/{name} says")
        return ("" if found[1] else "\n") + _joined(files[name], files, settings)

    return _SOURCE.sub(file, text)


def _loads(modules: Sequence[str]) -> list[str]:
    for name in modules:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"--module {name!r}: a name without spaces or quotes is needed")
    loads = [f"module load {shlex.quote(name)} || exit 2" for name in modules]
    return ["command -v module >/dev/null || . /etc/profile", *loads] if loads else []


def submit(script: str, scheduler: str) -> str:
    """Give a script to the scheduler; returns its answer.

    Raises:
        ConfigError: the scheduler's command is not installed, or the scheduler refuses.
    """
    command = SCHEDULERS[scheduler][1]
    try:
        # Names of files are bytes, and need not be text.
        done = subprocess.run([command], input=os.fsencode(script), capture_output=True)
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no {command} here; --dry-run prints the script, and --scheduler names "
            "another scheduler"
        ) from error
    if done.returncode:
        raise ConfigError(f"{command} refuses: {os.fsdecode(done.stderr).strip()}")
    return os.fsdecode(done.stdout).strip()


def read_scripts(folder: Path | None) -> dict[str, str]:
    """The scripts of a folder, and those of ``sites/`` in it, by name.

    Args:
        folder: ``None``: ``jobs`` in the current folder if it has one, else that of the package.

    Raises:
        ConfigError: a script that every job needs is missing.
    """
    here = Path("jobs")
    jobs = folder or (here if (here / "train.sbatch").exists() else examples.folder())
    needed = [pattern for pattern, _ in SCHEDULERS.values()]
    read = [jobs / name for name in needed]
    read += sorted((*jobs.glob("*.sh"), *jobs.glob("sites/*.sh")))
    try:
        return {str(path.relative_to(jobs)): path.read_text() for path in read}
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: {error.strerror}; --jobs names a folder with {', '.join(needed)}, "
            "and is not needed for the package's own"
        ) from error
