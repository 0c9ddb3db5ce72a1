"""A job script for SLURM, from the one in jobs/ and what the command line says."""

import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpitrain.config import ConfigError, examples

_TIME = re.compile(r"(\d+-)?\d{1,3}(:\d{2}){0,2}")
#: How the scripts find ``launch.sh`` when sbatch is given them as they are.
_SOURCE = re.compile(r"^\. .*/launch\.sh\"?$", re.MULTILINE)
_NAME = re.compile(r"[\w.,@%+=:/\[\]-]+")


def directives(
    *,
    nodes: int,
    ranks_per_node: int,
    time: str,
    partition: str | None = None,
    account: str | None = None,
    gpus_per_node: int = 0,
    name: str | None = None,
) -> dict[str, str]:
    """The #SBATCH lines of a job, checked.

    Raises:
        ConfigError: a number is too small, or a word has characters that SLURM would not take.
    """
    for what, count, least in (
        ("--nodes", nodes, 1),
        ("--ranks-per-node", ranks_per_node, 1),
        ("--gpus-per-node", gpus_per_node, 0),
    ):
        if count < least:
            raise ConfigError(f"{what} {count}: at least {least} is needed")
    if not _TIME.fullmatch(time):
        raise ConfigError(f"--time {time!r}: expected minutes, hours:minutes:seconds or days-hours")
    found = {"nodes": str(nodes), "ntasks-per-node": str(ranks_per_node), "time": time}
    found |= {"gpus-per-node": str(gpus_per_node)} if gpus_per_node else {}
    for key, word in (("partition", partition), ("account", account), ("job-name", name)):
        if word is None:
            continue
        if not _NAME.fullmatch(word):
            raise ConfigError(f"--{key} {word!r}: a name without spaces or quotes is needed")
        found[key] = word
    return found


def render(
    script: str, lines: Mapping[str, str], arguments: Sequence[str], python: str, jobs: Path
) -> str:
    """``script`` as it runs from any folder, with other #SBATCH lines and ``arguments``; pure.

    Args:
        script: a job script, as ``jobs/train.sbatch``.
        lines: values by option; those that the script has are replaced, others added.
        arguments: quoted here, whatever is in them.
        python: the interpreter, unless ``MPITRAIN_PYTHON`` names another when it is submitted.
        jobs: the folder whose ``launch.sh`` is sourced.
    """
    left = dict(lines)
    done = []
    for line in script.splitlines():
        found = re.fullmatch(r"#SBATCH --([\w-]+)=.*", line)
        if found and found[1] in left:
            line = f"#SBATCH --{found[1]}={left.pop(found[1])}"
        done.append(line)
    last = max(i for i, line in enumerate(done) if line.startswith("#SBATCH"))
    added = [f"#SBATCH --{key}={value}" for key, value in left.items()]
    given = f"set -- {shlex.join(arguments)}"
    chosen = f"export MPITRAIN_PYTHON=${{MPITRAIN_PYTHON:-{shlex.quote(python)}}}"
    whole = "\n".join([*done[: last + 1], *added, chosen, given, *done[last + 1 :], ""])
    source = f". {shlex.quote(str(jobs / 'launch.sh'))}"
    return _SOURCE.sub(lambda _: source, whole)


def submit(script: str) -> str:
    """Give a script to sbatch; what it says.

    Raises:
        ConfigError: there is no sbatch here, or it refuses.
    """
    try:
        done = subprocess.run(["sbatch"], input=script, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ConfigError("there is no sbatch here; --dry-run prints the script") from error
    if done.returncode:
        raise ConfigError(f"sbatch refuses: {done.stderr.strip()}")
    return done.stdout.strip()


def read_script(folder: Path | None) -> tuple[str, Path]:
    """``train.sbatch``, and the whole path of the folder that it is in.

    Args:
        folder: ``None``: ``jobs`` in the current folder if it has one, else that of the package.

    Raises:
        ConfigError: it is not there, or ``launch.sh`` is not beside it.
    """
    here = Path("jobs")
    jobs = folder or (here if (here / "train.sbatch").exists() else examples.folder())
    try:
        script = (jobs / "train.sbatch").read_text()
        (jobs / "launch.sh").read_text()
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: {error.strerror}; --jobs names a folder with train.sbatch and "
            "launch.sh, and is not needed for the package's own"
        ) from error
    return script, jobs.absolute()
