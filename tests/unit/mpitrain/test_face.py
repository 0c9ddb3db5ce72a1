"""Names that mpitrain takes of collectives: its face, and a few others for a reason each."""

import ast
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[3]
#: The package itself, the modules of its first floor, and its folders, by their public names.
MODULES = {"collectives"} | {f"collectives.{p.stem}" for p in (ROOT / "collectives").glob("*.py")}
FOLDERS = {f"collectives.{p.parent.name}" for p in (ROOT / "collectives").glob("*/__init__.py")}
#: Modules that lie deeper, and why mpitrain needs it.
DEEPER = {
    "collectives.bench.point_to_point": "doctor times a message as tune does",
    "collectives.calls.native": "doctor names the MPI library as the tuning table does",
    "collectives.calls.tables": "doctor looks up the tuning table as a call does",
    "collectives.execution.transport.cuda_probe": "doctor tries a transfer of device memory",
    "collectives.execution.transport.shared_memory": "doctor tries the node's memory alone",
}


def imported():
    """Modules of collectives that mpitrain imports from, with the names that it takes."""
    found = {}
    for path in (ROOT / "mpitrain").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                if node.module.partition(".")[0] == "collectives":
                    names = {alias.name for alias in node.names}
                    found.setdefault(node.module, set()).update(names)
            elif isinstance(node, ast.Import):
                assert not [alias for alias in node.names if alias.name.startswith("collectives")]
    return found


def test_no_deeper_than_the_face():
    assert set(imported()) - MODULES - FOLDERS == set(DEEPER) and len(DEEPER) <= 5


def test_names_of_folders_are_public():
    found = imported()
    for module in FOLDERS & set(found):
        there = import_module(module)
        later = dir(there) if hasattr(there, "__getattr__") else ()
        assert found[module] <= {*there.__all__, *later}, module
