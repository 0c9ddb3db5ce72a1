"""A job script for SLURM, from the one in jobs/ and what the command line says."""

import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpitrain.config import ConfigError

_TIME = re.compile(r"(\d+-)?\d{1,3}(:\d{2}){0,2}")
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


def render(script: str, lines: Mapping[str, str], arguments: Sequence[str]) -> str:
    """``script`` with other #SBATCH lines, and with ``arguments`` as its own; pure.

    Args:
        script: a job script, as ``jobs/train.sbatch``.
        lines: values by option; those that the script has are replaced, others added.
        arguments: quoted here, whatever is in them.
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
    return "\n".join([*done[: last + 1], *added, given, *done[last + 1 :], ""])


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


def read_script(folder: Path) -> str:
    """``train.sbatch`` of a folder of job scripts; ``ConfigError`` if it is not there."""
    path = folder / "train.sbatch"
    try:
        return path.read_text()
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; run in the repository, or --jobs DIR"
        ) from error
