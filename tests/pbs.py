"""A stand-in for OpenPBS and for the mpiexec of HPE's PALS, as their manuals describe them.

``Pbs(folder)`` writes the commands ``qsub``, ``qstat`` and ``mpiexec`` to ``folder/bin``.  ``qsub``
checks the directives and puts the job into a queue; ``Pbs.drain`` runs it, one job after the other,
as PBS does: from a spooled copy, in an environment that is not the submitting shell's, with a node
file, from the home folder, with SIGTERM at the end of the walltime and SIGKILL soon after.
``mpiexec`` takes PALS's options and starts the ranks with the mpiexec of the environment.
"""

import getopt
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Options of qsub; those with a colon have a value.
_OPTIONS = "a:A:c:C:e:hIj:J:k:l:m:M:N:o:p:P:q:r:R:S:u:v:VW:Xz"
_CHUNK = {"ncpus": int, "mpiprocs": int, "ompthreads": int, "ngpus": int, "mem": str, "system": str}
_PLACE = re.compile(r"(free|pack|scatter|vscatter)(:(excl|shared|exclhost))?(:group=\w+)?")
_KILL_DELAY_S = 10


class Refused(Exception):
    """What qsub says before it ends with another status than 0."""


def options(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """qsub's options, those of ``-l`` by resource; and the words behind them."""
    try:
        found, rest = getopt.getopt(words, _OPTIONS)
    except getopt.GetoptError as error:
        raise Refused(f"qsub: {error}") from error
    told = {}
    for name, value in found:
        if name != "-l":
            told[name] = value
            continue
        for one in value.split(","):
            resource, equals, amount = one.partition("=")
            if not equals or resource not in ("select", "place", "walltime", "filesystems"):
                raise Refused(f"qsub: Unknown resource: {resource}")
            told[f"-l {resource}"] = amount
    return told, rest


def directives(script: str) -> dict[str, str]:
    """Those of ``#PBS`` lines before the first command."""
    told: dict[str, str] = {}
    for line in script.splitlines():
        if line.startswith("#PBS "):
            told |= options(shlex.split(line[5:]))[0]
        elif line.strip() and not line.startswith("#"):
            break
    return told


def check(told: Mapping[str, str]) -> dict[str, int]:
    """The chunk that a job asks for: ``count`` of them, and resources of each.

    Raises:
        Refused: what is asked for is none, by PBS's manual or by the site, which wants an account.
    """
    name = told.get("-N", "")
    if not re.fullmatch(r"[A-Za-z]\S{0,229}", name):
        raise Refused(f"qsub: illegal -N value {name!r}")
    if "-A" not in told:
        raise Refused("qsub: Account_Name is required to be set.")
    if not re.fullmatch(r"\d+:[0-5]\d:[0-5]\d", told.get("-l walltime", "")):
        raise Refused("qsub: Illegal attribute or resource value Resource_List.walltime")
    if not _PLACE.fullmatch(told.get("-l place", "free")):
        raise Refused("qsub: Illegal attribute or resource value Resource_List.place")
    if told.get("-j", "n") not in ("oe", "eo", "n") or told.get("-r", "y") not in ("y", "n"):
        raise Refused("qsub: illegal -j or -r value")
    count, *resources = told.get("-l select", "1").split(":")
    chunk: dict[str, int] = {"count": int(count), "mpiprocs": 1}
    for one in resources:
        key, _, value = one.partition("=")
        if key not in _CHUNK or not value:
            raise Refused(f"qsub: Unknown resource: {key}")
        if _CHUNK[key] is int:
            chunk[key] = int(value)
        elif key == "mem" and not re.fullmatch(r"\d+[kmgt]?b", value):
            raise Refused(f"qsub: Illegal resource value mem={value}")
    return chunk


class Pbs:
    """A server and its nodes.

    Attributes:
        commands: to put before PATH where jobs are submitted.
    """

    def __init__(self, folder: Path, mpiexec: str) -> None:
        self.folder = folder
        self.commands = folder / "bin"
        self.commands.mkdir(parents=True)
        for part in ("spool", "queue", "home"):
            (folder / part).mkdir()
        for name in ("qsub", "qstat", "mpiexec"):
            path = self.commands / name
            words = [sys.executable, str(Path(__file__)), name, str(folder), mpiexec]
            path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
            path.chmod(0o755)

    def drain(self) -> list[int]:
        """Run what is queued, in the order of submission; the jobs' exit statuses."""
        statuses = []
        while queued := sorted((self.folder / "queue").iterdir()):
            job = json.loads(queued[0].read_text())
            queued[0].unlink()
            statuses.append(self._run(job))
        return statuses

    def _run(self, job: dict[str, str]) -> int:
        told, number = directives(Path(job["script"]).read_text()), job["number"]
        chunk = check(told)
        nodes = self.folder / f"nodes.{number}"
        lines = [f"x{node}\n" for node in range(chunk["count"]) for _ in range(chunk["mpiprocs"])]
        nodes.write_text("".join(lines))
        environment = {
            "HOME": str(self.folder / "home"),
            "PATH": f"{self.commands}:/usr/local/bin:/usr/bin:/bin",
            "TMPDIR": tempfile.gettempdir(),
            "PBS_JOBID": f"{number}.server",
            "PBS_JOBNAME": told["-N"],
            "PBS_NODEFILE": str(nodes),
            "PBS_O_WORKDIR": job["folder"],
            "PBS_ENVIRONMENT": "PBS_BATCH",
            "OMP_NUM_THREADS": str(chunk.get("ompthreads", chunk.get("ncpus", 1))),
            **json.loads(job["variables"]),
        }
        output = Path(job["folder"]) / f"{told['-N']}.o{number}"
        hours, minutes, seconds = map(int, told["-l walltime"].split(":"))
        with output.open("w") as file:
            shell = subprocess.Popen(
                ["bash", job["script"]], cwd=environment["HOME"], env=environment,
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + (hours * 60 + minutes) * 60 + seconds
        for word in (signal.SIGTERM, signal.SIGKILL):
            try:
                return shell.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(shell.pid, word)
                deadline = time.monotonic() + _KILL_DELAY_S
        return shell.wait()


def qsub(folder: Path, words: list[str]) -> str:
    """Queue a script, from a file or from stdin; its number."""
    told, rest = options(words)
    script = Path(rest[0]).read_text() if rest else sys.stdin.read()
    check(directives(script) | told)
    variables = {}
    for one in filter(None, told.get("-v", "").split(",")):
        name, equals, value = one.partition("=")
        variables[name] = value if equals else os.environ[name]
    if "-W" in told and not re.fullmatch(r"depend=afterany:\d+\.server", told["-W"]):
        raise Refused("qsub: illegal -W value")
    number = str(1 + len(list((folder / "spool").iterdir())))
    spooled = folder / "spool" / f"{number}.server.SC"
    spooled.write_text(script)
    job = {
        "number": number, "script": str(spooled), "folder": os.getcwd(),
        "variables": json.dumps(variables), "depends": told.get("-W", ""),
    }  # fmt: skip
    (folder / "queue" / f"{number:0>6}").write_text(json.dumps(job))
    return f"{number}.server"


def qstat(folder: Path, words: list[str]) -> str:
    """``qstat -f JOB``."""
    number = words[-1].partition(".")[0]
    told = directives((folder / "spool" / f"{number}.server.SC").read_text())
    lines = [f"Job Id: {number}.server", f"    Job_Name = {told['-N']}"]
    lines += [f"    Resource_List.{k[3:]} = {v}" for k, v in told.items() if k.startswith("-l ")]
    return "\n".join(lines)


def pals(mpiexec: str, words: list[str]) -> list[str]:
    """The command that starts the ranks, from PALS's options before it."""
    told: dict[str, str] = {}
    while words and words[0].startswith("-"):
        name, equals, value = words.pop(0).lstrip("-").partition("=")
        if name not in ("n", "ppn", "cpu-bind", "depth"):
            raise Refused(f"mpiexec: unknown option {name}")
        told[name] = value if equals else words.pop(0)
    nodes = len(set(Path(os.environ["PBS_NODEFILE"]).read_text().split()))
    if int(told["n"]) != int(told["ppn"]) * nodes:
        raise Refused(f"mpiexec: {told} on {nodes} nodes")
    return [mpiexec, "-n", told["n"], *words]


def main() -> int:
    """One of the commands, as the scripts in ``bin`` call it."""
    name, folder, mpiexec, *words = sys.argv[1:]
    try:
        if name == "mpiexec":
            command = pals(mpiexec, words)
            # None of PBS's own: the launcher beneath would look for its nodes.
            kept = {k: v for k, v in os.environ.items() if not k.startswith("PBS_")}
            allowed = {
                "OMPI_ALLOW_RUN_AS_ROOT": "1",
                "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            }
            os.execvpe(command[0], command, kept | allowed)
        print({"qsub": qsub, "qstat": qstat}[name](Path(folder), words))
    except Refused as refused:
        print(refused, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
