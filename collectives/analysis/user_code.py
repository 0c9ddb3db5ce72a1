"""Finds a program's own algorithms, in objects, files and installed packages, and registers them.

``algorithm=`` and the commands take an :class:`~collectives.algorithms.Algorithm`,
``"file.py:name"``, or a name that an installed package has in the entry point group
``collectives.algorithms``.
"""

import hashlib
import importlib.util
import re
import sys
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from threading import RLock
from types import ModuleType

from collectives import extras
from collectives.algorithms import REGISTRY, Algorithm
from collectives.errors import UnknownAlgorithm, hint, words

#: The group of entry points in which packages name their algorithms.
GROUP = "collectives.algorithms"
#: Held while a file is executed.
_EXECUTING = RLock()
_LINKS = re.compile(r"spanning_trees:links=(?P<path>[^,]+\.txt),?(?P<options>.*)", re.DOTALL)
_FILE = re.compile(r"(?P<path>.+?\.py)(?::(?P<name>\w+))?(?P<options>:.*)?", re.DOTALL)


def resolve(algorithm: Algorithm | str, collective: str | None = None) -> str:
    """Registers the algorithm if it is new; returns its name with its options.

    Args:
        algorithm: an :class:`Algorithm`; ``"file.py:name"``, where a variable of the file or its
            algorithm has that name, or ``"file.py"`` if the file has one algorithm; a name in the
            registry or of an entry point; options may follow, as in ``"file.py:name:segments=4"``;
            or ``"spanning_trees:links=file.txt"``, a matrix of the links between the ranks.
            Anything else is given back as it is.
        collective: the call's; ``None`` if there is no call yet.

    Raises:
        UnknownAlgorithm: no such file, or nothing of this name in it, or the algorithm is one of
            another collective.
        ScheduleError: the algorithm that was found is wrong.
    """
    if isinstance(algorithm, Algorithm):
        _expect_one_of(collective, [algorithm])
        return extras.register(algorithm).name
    if not isinstance(algorithm, str):
        return algorithm
    if match := _LINKS.fullmatch(algorithm):
        registered = [extras.register(one) for one in extras.trees_of_file(Path(match["path"]))]
        return f"{registered[0].name}:{match['options'] or ''}".removesuffix(":")
    if match := _FILE.fullmatch(algorithm):
        found = _of_file(Path(match["path"]), match["name"])
        _expect_one_of(collective, found)
    else:
        name = algorithm.partition(":")[0].strip()
        if REGISTRY.knows(name):
            return algorithm
        found = [a for point in entry_points(group=GROUP, name=name) for a in _of_point(point)]
    for one in found:
        extras.register(one)
    return f"{found[0].name}{match['options'] or ''}" if match else algorithm


def _expect_one_of(collective: str | None, found: list[Algorithm]) -> None:
    having = [algorithm.collective for algorithm in found]
    if collective not in (None, *having):
        raise UnknownAlgorithm(
            f"{found[0].name} is an algorithm of {', '.join(having)}, and this is {collective}"
        )


def is_own(algorithm: object) -> bool:
    """Whether :func:`resolve` has to find it, in a program or a file of its own."""
    return isinstance(algorithm, Algorithm) or (
        isinstance(algorithm, str)
        and bool(_FILE.fullmatch(algorithm) or _LINKS.fullmatch(algorithm))
    )


def packaged() -> list[str]:
    """Names of the algorithms in installed packages."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def _of_file(path: Path, name: str | None) -> list[Algorithm]:
    """The algorithms of a file that have a name, or are the value of a variable of that name."""
    there = {
        variable: value
        for variable, value in vars(_imported(path)).items()
        if isinstance(value, Algorithm) and not _is_packages_own(value)
    }
    known = dict.fromkeys(a.name for a in there.values())
    if name is None and len(known) == 1:
        (name,) = known
    found = [a for a in there.values() if a.name == name]
    if not found and name in there:
        found = [there[name]]
    if found:
        return found
    if not known:
        raise UnknownAlgorithm(
            f"{path} has no algorithm; give it one: mine = Algorithm('allreduce', 'mine', rounds)"
        )
    if name is None:
        first = next(iter(known))
        raise UnknownAlgorithm(f"{path} has {', '.join(known)}; say which, as {path}:{first}")
    raise UnknownAlgorithm(f"{path} has no algorithm {name!r}; {hint(name, known)}")


def _is_packages_own(algorithm: Algorithm) -> bool:
    """Whether the file has imported it from this package."""
    known = any(entry is algorithm for entry in REGISTRY)
    return known and not REGISTRY.digest(algorithm.collective, algorithm.name)


def _imported(path: Path) -> ModuleType:
    """The file as a module, executed once in a process; its own folder is searched for imports.

    A thread that comes while another one executes it waits; a file that names itself does not.
    """
    try:
        resolved = path.expanduser().resolve()
        is_file = resolved.is_file()
    except (OSError, RuntimeError, ValueError) as error:
        raise UnknownAlgorithm(f"{str(path)[:80]!r} cannot be a file: {error}") from error
    key = f"_collectives_{path.stem}_{hashlib.sha256(str(resolved).encode()).hexdigest()[:8]}"
    with _EXECUTING:
        if key in sys.modules:
            return sys.modules[key]
        if not is_file:
            raise UnknownAlgorithm(f"there is no file {str(path)[:80]!r}; write file.py:name")
        try:
            return executed(resolved, key)
        except (Exception, SystemExit) as error:
            why = words(error)
            raise UnknownAlgorithm(f"{path} cannot be imported: {why}") from error


def executed(path: Path, name: str) -> ModuleType:
    """A file as a module of this name, whose folder is searched for what it imports itself.

    Raises:
        BaseException: whatever it raises.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("no Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    folder = str(path.parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        if folder in sys.path:  # unless the file has taken it out
            sys.path.remove(folder)
    return module


def _of_point(point: EntryPoint) -> Iterable[Algorithm]:
    """The algorithms that a package has under a name, each for another collective."""
    where = f"the entry point {point.name} = {point.value} of {GROUP}"
    try:
        loaded = point.load()
    except Exception as error:
        raise UnknownAlgorithm(f"{where} cannot be loaded: {error}") from error
    algorithms = [loaded] if isinstance(loaded, Algorithm) else loaded
    if not isinstance(algorithms, list | tuple) or not all(
        isinstance(a, Algorithm) and a.name == point.name for a in algorithms
    ):
        raise UnknownAlgorithm(f"{where} is neither an Algorithm of that name nor a list of them")
    return algorithms
