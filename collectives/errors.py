"""The package's exceptions.  Each message is one sentence that names the fix where there is one."""

import difflib
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

#: How to get CuPy, which has a package for each CUDA.
INSTALL_CUPY = "pip install cupy-cuda13x (or cupy-cuda12x)"


def install(package: str, extra: str) -> str:
    """How to get a package that is missing, and which of our extras has it."""
    return f"pip install {package} (the extra {extra!r})"


def needed(
    package: str, extra: str, who: str, kind: type[Exception] = ImportError, module: str = ""
) -> Any:
    """A package, or a module of it, that ``who`` needs; an error of ``kind`` says how to get it."""
    try:
        return import_module(module or package)
    except ImportError as error:
        raise kind(f"{who} needs {package} ({error}): {install(package, extra)}") from error


def words(error: BaseException) -> str:
    """Class and message of an error in one line; the class alone where there is no message."""
    try:
        message = " ".join(str(error).split())
    except Exception:  # a user's class whose __str__ fails
        message = ""
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


class CollectiveError(Exception):
    """Base of all exceptions that this package defines."""


class UnknownAlgorithm(CollectiveError, ValueError):
    """No such algorithm or collective, or an option or number of ranks that it is not for."""


class ScheduleError(CollectiveError):
    """A schedule that is wrong: found by the verifier, or refused when it is bound."""


class TooLarge(CollectiveError):
    """A schedule has more steps than can be handled in minutes."""


def hint(name: str, known: Iterable[str], otherwise: str = "there are") -> str:
    """``did you mean 'ring'?`` for the known name that is nearest, or all that are known."""
    known = list(known)
    alike = 0.5 if len(name) < 4 else 0.6  # one letter of two, as in lt for lr
    near = difflib.get_close_matches(name, known, n=1, cutoff=alike)
    return f"did you mean {near[0]!r}?" if near else f"{otherwise} {', '.join(known)}"


def by_ranks(told: Sequence[str]) -> str:
    """The ranks' words, equal ones once: ``ranks 0, 2: this; rank 1: that``."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(told):
        ranks.setdefault(text, []).append(rank)
    return "; ".join(
        f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}: {text}"
        for text, who in ranks.items()
    )


class InvalidBuffer(CollectiveError, ValueError, BufferError):
    """A buffer that cannot be used as it was given: layout, type, size or writability."""


class InvalidBufferType(InvalidBuffer, TypeError):
    """A buffer of a wrong type, for which mpi4py raises a ``TypeError``."""


class UnknownType(InvalidBuffer, KeyError):
    """A buffer names an unknown type, for which mpi4py raises a ``KeyError``."""

    __str__ = Exception.__str__  # without KeyError's quotes


class MismatchError(CollectiveError):
    """Ranks called different collectives, or with other lengths."""


class CorruptMessage(CollectiveError):
    """A message arrived with other bits (found with checksums)."""


class LaunchError(CollectiveError, RuntimeError):
    """The processes were started in a way that cannot work."""
