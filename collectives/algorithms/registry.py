"""The registry: algorithms of the package and of the program, by collective and name.

Entries are added and never replaced or removed, so a name keeps its meaning while the process
lives.
"""

import logging
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from collectives import extras
from collectives.algorithms.algorithm import Algorithm, Option
from collectives.contracts import contract
from collectives.errors import UnknownAlgorithm, hint
from collectives.schedule import Schedule

log = logging.getLogger("collectives")
#: Words that ``algorithm=`` and the benchmark take besides names of algorithms.
RESERVED = ("auto", "native", "nccl", "all")


def resolve(algorithm: Any, collective: str | None = None) -> str:
    """As :func:`collectives.analysis.user_code.resolve`, which no known name needs."""
    is_known = isinstance(algorithm, str) and REGISTRY.knows(algorithm) and ".txt" not in algorithm
    return algorithm if is_known else extras.resolve(algorithm, collective)


class Registry:
    """Iterates over all entries: the package's first, then the others as they were added."""

    def __init__(self) -> None:
        #: Each algorithm with its digest.
        self._entries: dict[tuple[str, str], tuple[Algorithm, str]] = {}

    def __iter__(self) -> Iterator[Algorithm]:
        return iter([algorithm for algorithm, _ in [*self._entries.values()]])

    def add(self, algorithm: Algorithm, digest: str = "") -> None:
        """Adds an entry that is known to be right: :func:`collectives.register` proves others.

        Args:
            digest: identifies the code of a program's algorithm; empty for the package's.

        Raises:
            UnknownAlgorithm: the name is taken, or cannot be one.
        """
        name: object = algorithm.name
        if not isinstance(name, str) or not name.isidentifier() or name in RESERVED:
            raise UnknownAlgorithm(
                f"an algorithm cannot have the name {name!r}; take letters, digits and _, and none "
                f"of {', '.join(RESERVED)}"
            )
        key = (algorithm.collective, name)
        # In one step, as another thread may add the same one.
        there, known = self._entries.setdefault(key, (algorithm, digest))
        if there is not algorithm and (not digest or digest != known):
            raise UnknownAlgorithm(
                f"there is another {algorithm.collective} algorithm {algorithm.name!r}; give this "
                "one a name of its own"
            )
        if _code(there) != _code(algorithm):
            log.warning(
                "%s %s does what the first of its name does on 1 to 9 ranks, and that one stays; "
                "give a changed one another name, or start anew", *key,
            )  # fmt: skip

    def names(self, collective: str, size: int | None = None) -> list[str]:
        """Names of the algorithms of ``collective``, of those that ``size`` ranks can run; raises
        :class:`UnknownAlgorithm`."""
        contract(collective)
        every = [name for of, name in self._entries if of == collective]
        return every if size is None else [n for n in every if self._serves(collective, n, size)]

    def _serves(self, collective: str, name: str, size: int) -> bool:
        with suppress(UnknownAlgorithm):
            self.schedule(collective, name, size)
            return True
        return False

    def knows(self, algorithm: str) -> bool:
        """Whether it is a reserved word, or names an algorithm of some collective."""
        name = algorithm.partition(":")[0].strip()
        return name in RESERVED or any(other == name for _, other in [*self._entries])

    def find(self, collective: str, name: str) -> Algorithm:
        """The entry for ``name``; raises :class:`UnknownAlgorithm` with the nearest name."""
        known = self.names(collective)
        if name in known:
            return self._entries[collective, name][0]
        others = [of for of, other in self._entries if other == name]
        which = f"it is one for {' and '.join(others)}" if others else hint(name, known)
        raise UnknownAlgorithm(f"no {collective} algorithm {name!r}; {which}")

    def schedule(
        self, collective: str, name: str, size: int, root: int = 0, **options: Option
    ) -> Schedule:
        """The schedule of an entry; a program's algorithm is
        :func:`~collectives.algorithms.guard.guarded`.

        Raises:
            UnknownAlgorithm: there is no such algorithm, option or size.
            ScheduleError: a function of a program's algorithm raised, or returned what is no
                schedule; possibly only while the rounds are generated.
        """
        entry = self.find(collective, name)
        if self.digest(collective, name):
            return extras.guarded(entry, size, root, **options)
        return entry.schedule(size, root, **options)

    def digest(self, collective: str, name: str) -> str:
        """Digest of a program's algorithm; empty for the package's and for an unknown name."""
        _, digest = self._entries.get((collective, name), (None, ""))
        return digest


def _code(algorithm: Algorithm) -> object:
    """Code of an algorithm's function, which a second import of its file leaves equal; or None."""
    code = getattr(algorithm.rounds or algorithm.compose, "__code__", None)
    return code and code.replace(co_firstlineno=1)  # wherever it stands


#: All algorithms: those of ``table.py``, then those that were registered.
REGISTRY = Registry()
