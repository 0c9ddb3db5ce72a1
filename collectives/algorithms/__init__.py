"""The algorithms, one file each, and functions that find and build them by name and options."""

from collections.abc import Callable

from collectives.algorithms.algorithm import Algorithm, Option
from collectives.algorithms.registry import REGISTRY, resolve
from collectives.algorithms.segments import MOST_SEGMENTS, segmented
from collectives.algorithms.table import ALGORITHMS
from collectives.contracts import CONTRACTS
from collectives.errors import UnknownAlgorithm, hint
from collectives.schedule import Schedule

#: Characters of an option's value.
_LONGEST = 32


names = REGISTRY.names
find = REGISTRY.find


def check(collective: str, algorithm: object, size: int | None = None) -> None:
    """Checks that a call of ``collective`` may ask for ``algorithm``, with its options.

    Args:
        size: ranks, which bound the values of options.

    Raises:
        UnknownAlgorithm: it may not; the message says why.
    """
    name, options = parse(algorithm)
    if name in ("auto", "native", "nccl"):
        if options:
            raise UnknownAlgorithm(f"{algorithm}: {name} has no options")
        return
    entry = find(collective, name)
    segments = options.pop("segments", "auto")
    if segments != "auto":
        _check_segments(segments, str(algorithm))
    entry.check(options, size)


def check_default(algorithm: object, size: int | None = None) -> None:
    """Checks a communicator's default, which is used wherever a collective has this algorithm.

    Raises:
        UnknownAlgorithm: no collective has an algorithm of this name (the message gives the
            nearest one), or no algorithm of this name takes these options.
    """
    name, _ = parse(algorithm)
    having = [entry.collective for entry in REGISTRY if entry.name == name]
    if name == "nccl":
        raise UnknownAlgorithm(
            "nccl is for arrays on a GPU; name it in the calls that have some, and not for a whole "
            "communicator"
        )
    known = ["auto", "native", *dict.fromkeys(entry.name for entry in REGISTRY)]
    if name not in known:
        raise UnknownAlgorithm(f"no collective has an algorithm {name!r}; {hint(name, known)}")
    refused = None
    for collective in having or ["allreduce"]:  # auto and native are everywhere the same
        try:
            return check(collective, algorithm, size)
        except UnknownAlgorithm as error:
            refused = refused or error
    if refused is not None:
        raise refused


def parse(text: object) -> tuple[str, dict[str, Option]]:
    """``"parameter_server:servers=2"`` -> ``("parameter_server", {"servers": 2})``.

    Raises:
        UnknownAlgorithm: ``text`` is no string of this form.
    """
    if not isinstance(text, str):
        raise UnknownAlgorithm(
            f"algorithm={text!r} is of type {type(text).__name__}; give a name, as in 'ring', "
            "'auto' or 'native', or an Algorithm"
        )
    name, _, rest = text.partition(":")
    options: dict[str, Option] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not (value.isidentifier() or value.isdecimal()) or key in options:
            raise UnknownAlgorithm(
                f"cannot read {item!r} in {text!r}; write name:option=value,option=value"
            )
        if len(value) > _LONGEST:
            raise UnknownAlgorithm(f"{key}={value[:_LONGEST]}... in {name} is too long")
        options[key] = int(value) if value.isdecimal() else value
    return name.strip(), options


def own(collective: str, algorithm: str) -> list[str]:
    """Digests of the program's own algorithms that ``algorithm`` names, itself or in an option.

    Empty if it names algorithms of the package alone.
    """
    name, options = parse(algorithm)
    parts = [a for value in options.values() for a in REGISTRY if a.name == str(value)]
    keys = [(collective, name), *((part.collective, part.name) for part in parts)]
    return [digest for key in keys if (digest := REGISTRY.digest(*key))]


def in_segments(collective: str, algorithm: str, size: int, best: Callable[[Schedule], int]) -> str:
    """``algorithm`` with ``segments=auto`` replaced by the number that ``best`` returns."""
    name, options = parse(algorithm)
    if options.get("segments") != "auto":
        return algorithm
    del options["segments"]
    options["segments"] = best(REGISTRY.schedule(collective, name, size, 0, **options))
    return f"{name}:{','.join(f'{key}={value}' for key, value in options.items())}"


def build(
    collective: str,
    algorithm: str,
    size: int,
    root: int = 0,
    items: int | None = None,
    proved: Schedule | None = None,
) -> Schedule:
    """The schedule for an algorithm as a user spells it, with its options.

    Every algorithm has the option ``segments``, the number of overlapping slices of the buffers.
    Where their size is known, ``segments=auto`` takes the number that the cost model finds best.

    Args:
        items: number of items of a block, if all ranks know it; a piece of a block is cut into no
            more slices than it has items.
        proved: the schedule without segments, if there is one already.

    >>> build("allreduce", "parameter_server:servers=2", 8).chunks
    2
    """
    name, options = parse(algorithm)
    segments = _check_segments(options.pop("segments", 1), algorithm)
    schedule = proved or REGISTRY.schedule(collective, name, size, root, **options)
    if items is not None:
        segments = max(1, min(segments, -(-items // schedule.chunks)))
    return segmented(schedule, segments, overlap=True)


def _check_segments(segments: Option, algorithm: str) -> int:
    if not isinstance(segments, int) or not 1 <= segments <= MOST_SEGMENTS:
        raise UnknownAlgorithm(
            f"{algorithm}: segments is a number from 1 to {MOST_SEGMENTS}, or auto in a call whose "
            "size is known"
        )
    return segments


__all__ = [
    "ALGORITHMS",
    "CONTRACTS",
    "REGISTRY",
    "Algorithm",
    "build",
    "check",
    "check_default",
    "find",
    "names",
    "own",
    "parse",
    "resolve",
]
