"""The algorithms: one file each, and what finds them by name in the table of all."""

import difflib
from collections.abc import Callable

from collectives.algorithms.registry import Algorithm, Option
from collectives.algorithms.table import ALGORITHMS
from collectives.contracts import CONTRACTS, contract
from collectives.errors import UnknownAlgorithm
from collectives.schedule import Schedule
from collectives.segments import segmented


def names(collective: str) -> list[str]:
    """Names of the algorithms of ``collective``; raises :class:`UnknownAlgorithm`."""
    contract(collective)
    return [a.name for a in ALGORITHMS if a.collective == collective]


def find(collective: str, name: str) -> Algorithm:
    """The entry for ``name``; raises :class:`UnknownAlgorithm` with the nearest name."""
    known = names(collective)
    for algorithm in ALGORITHMS:
        if (algorithm.collective, algorithm.name) == (collective, name):
            return algorithm
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
    raise UnknownAlgorithm(f"no {collective} algorithm {name!r}; {hint}")


def parse(text: str) -> tuple[str, dict[str, Option]]:
    """``"parameter_server:servers=2"`` -> ``("parameter_server", {"servers": 2})``."""
    name, _, rest = text.partition(":")
    options: dict[str, Option] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        value = value.strip()
        if not equals or (not value.isidentifier() and not value.isdecimal()):
            raise UnknownAlgorithm(
                f"cannot read {item!r} in {text!r}; write name:option=value,option=value"
            )
        options[key.strip()] = int(value) if value.isdecimal() else value
    return name.strip(), options


def in_segments(collective: str, algorithm: str, size: int, best: Callable[[Schedule], int]) -> str:
    """``algorithm`` with ``segments=auto``, if it says so, replaced by the number of ``best``."""
    name, options = parse(algorithm)
    if options.get("segments") != "auto":
        return algorithm
    del options["segments"]
    options["segments"] = best(find(collective, name).schedule(size, 0, **options))
    return f"{name}:{','.join(f'{key}={value}' for key, value in options.items())}"


def build(collective: str, algorithm: str, size: int, root: int = 0) -> Schedule:
    """The schedule for an algorithm as a user spells it, with its options.

    Every algorithm has the option ``segments``: as many overlapping slices of the buffers; where
    their size is known, ``segments=auto`` is as many as the cost model finds best.

    >>> build("allreduce", "parameter_server:servers=2", 8).chunks
    2
    """
    name, options = parse(algorithm)
    segments = options.pop("segments", 1)
    if not isinstance(segments, int) or segments < 1:
        raise UnknownAlgorithm(
            f"{algorithm}: segments is a number from 1 on, or auto in a call whose size is known"
        )
    schedule = find(collective, name).schedule(size, root, **options)
    return segmented(schedule, segments, overlap=True)


__all__ = ["ALGORITHMS", "CONTRACTS", "Algorithm", "build", "find", "names", "parse"]
