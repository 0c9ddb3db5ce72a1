"""What mpitrain takes of collectives: names of its face, and a few others for a reason each."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[3]
#: The package itself and the modules of its first floor.
FACE = {"collectives"} | {f"collectives.{p.stem}" for p in (ROOT / "collectives").glob("*.py")}
#: What lies deeper, and why mpitrain needs it.
DEEPER = {
    "collectives.analysis.user_code": "a job file may name parts of a program's file",
    "collectives.analysis.page": "pages of pipeline schedules have the style and keys of explore",
    "collectives.analysis.pictures": "find-lr refuses a picture's name as draw does, beforehand",
    "collectives.bench.point_to_point": "doctor times a message as tune does",
    "collectives.calls.native": "doctor looks up the tuning table as a call does",
    "collectives.analysis.topology": "the search's links are those that the simulator knows",
    "collectives.calls.tuner": "doctor says what auto would choose on this machine",
    "collectives.commands.arguments": "numbers on both command lines are read alike",
    "collectives.commands.program": "both command lines have --version and -v",
    "collectives.execution.memory": "doctor tries the node's memory alone, with no collective",
    "collectives.execution.transport": "Bytes, the type of what a faulty transport sends",
    "collectives.execution.transport.cuda_probe": "doctor tries a transfer of device memory",
    "collectives.execution.transport.mpi": "Envelope, what pipelines put their messages into",
    "collectives.execution.transport.shared_memory": "doctor tries the node's memory alone",
    "collectives.failure.abort": "an error of all ranks ends the job once, with one report",
    "collectives.failure.processes": "ranks find processes as the guards against dead ranks do",
    "collectives.torch": "the name of torch's backend, for the sentence that asks for it",
    "collectives.torch.backend": "codecs of DDP's buckets run among a group's collectives",
    "collectives.torch.__main__": "certify names a script's ranks as the launcher of torch does",
    "collectives.torch.register": "certify gives a script the backend that the launcher gives it",
    "collectives.virtual": "train --virtual runs the ranks in one process",
    "collectives.virtual.generators": "certify begins each run with the generators of the first",
    "collectives.execution.waiting": "ranks wait alike in pipelines and in collectives",
}


def imported():
    """Modules of collectives that mpitrain imports from, with the files that do."""
    found = {}
    for path in (ROOT / "mpitrain").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                if name.partition(".")[0] == "collectives":
                    found.setdefault(name, []).append(str(path.relative_to(ROOT)))
    return found


def test_no_deeper_than_the_face():
    deeper = {name: files for name, files in imported().items() if name not in FACE | set(DEEPER)}
    assert not deeper


def test_every_exception_is_needed():
    assert set(DEEPER) <= set(imported())
