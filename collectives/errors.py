"""The package's exceptions.  Each message is one sentence that names the fix where there is one."""

#: How to get CuPy, of which there is a package for each CUDA.
INSTALL_CUPY = "pip install cupy-cuda13x (or cupy-cuda12x)"


def install(package: str, extra: str) -> str:
    """How to get a package that is missing, and which of our extras has it."""
    return f"pip install {package} (the extra {extra!r})"


class CollectiveError(Exception):
    """Base of everything that this package raises on its own account."""


class UnknownAlgorithm(CollectiveError, ValueError):
    """No such algorithm or collective, or an option that the algorithm does not have."""


class ScheduleError(CollectiveError):
    """A schedule that is wrong: found by the verifier, or refused when it is bound."""


class TooLarge(CollectiveError):
    """A schedule over more ranks, or of more steps, than can be dealt with in minutes."""


class InvalidBuffer(CollectiveError, ValueError):
    """A buffer that cannot be used as it was given: layout, type, size or writability."""


class InvalidBufferType(InvalidBuffer, TypeError):
    """The same, of a wrong type: what mpi4py calls a ``TypeError``."""


class UnknownType(InvalidBuffer, KeyError):
    """A buffer names a type that there is not: what mpi4py calls a ``KeyError``."""

    __str__ = Exception.__str__  # without KeyError's quotes


class MismatchError(CollectiveError):
    """Ranks called collectives that do not belong together (found with checking on)."""


class CorruptMessage(CollectiveError):
    """A message arrived changed (found where messages carry checksums)."""


class LaunchError(CollectiveError, RuntimeError):
    """The processes were started in a way that cannot work."""
