"""Which room of mpitrain may import which: a folder, or a module beside the folders."""

import ast
from pathlib import Path

MPITRAIN = Path(__file__).parents[3] / "mpitrain"
#: From the first floor up; rooms that are not named are on the ground floor.  A room imports rooms
#: of lower floors, at the top of a file, in a function or for its types.
FLOORS = (
    {"compress", "fields", "group", "kernels"},
    {"config", "nn"},
    {"device", "metrics", "ranks"},
    {"data", "doctor", "optim", "parallel", "report"},
    {"objective", "update"},
    {"models"},
    {"pipeline"},
    {"training"},
    {"adapters", "checkpoint", "server", "sync"},
    {"callbacks", "user_objects"},
    {"auto_stages", "normalise", "run"},
    {"federated", "search"},
    {"start"},
    {"trainer"},
    {"certify"},
    {"commands"},
    {"__main__", "__init__"},
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS, 1) for room in rooms}
FILES = sorted(MPITRAIN.rglob("*.py"))


def room_of(path):
    return path.relative_to(MPITRAIN).parts[0].removesuffix(".py")


ROOMS = {room_of(path) for path in FILES}


def rooms_imported(path):
    """The rooms of mpitrain that a file names in its imports, its own left out."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} line {node.lineno}: name the whole module"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    rooms = {w[1] for w in [name.split(".") for name in found] if w[0] == "mpitrain" and len(w) > 1}
    assert rooms <= ROOMS, f"{path}: name the module, as in mpitrain.config"
    return rooms - {room_of(path)}


def test_no_arrow_runs_up():
    up = {
        f"{path.relative_to(MPITRAIN)} imports {other}"
        for path in FILES
        for other in rooms_imported(path)
        if FLOOR_OF.get(other, 0) >= FLOOR_OF.get(room_of(path), 0)
    }
    assert not up


def test_the_map_names_rooms_that_are_there():
    assert FLOOR_OF.keys() <= ROOMS
    assert len(FLOOR_OF) == sum(map(len, FLOORS)), "a room is on two floors"
