"""An algorithm: a generator of rounds with its name and properties."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from collectives.contracts import Member, contract
from collectives.errors import UnknownAlgorithm, hint
from collectives.schedule import Copy, Round, Schedule, recvbuf, sendbuf

Option = int | str


@dataclass(frozen=True, eq=False)
class Algorithm:
    """A collective algorithm of the package's table, or of a program.

    >>> Algorithm("allreduce", "mine", rounds, "what it does", "whose it is")  # doctest: +SKIP

    Attributes:
        collective, name: the pair that identifies it in the registry.
        rounds: the generator ``rounds(rank, size, **options)``; for a collective with a root,
            ``rounds(rank, size, root, **options)``.  The default of an option says what it is: a
            number, a name, or a choice of ``True`` and ``False``, which 1 and 0 set.
        summary, reference: one line each, printed by ``python -m collectives list``.
        chunks: pieces into which it cuts a block, as a function of the size (and options).
        workspace: chunks of workspace, as a function of the size.
        keeps_order: reduces in rank order at every size, as operations that do not commute need.
        in_place: reads no chunk of ``sendbuf`` after its place in ``recvbuf`` has been written.
        uneven: blocks may differ in length (v-variants).
        uniform: in each round, all ranks move equal messages over equal distances.
        compose: used without ``rounds``: ``compose(size, **options)`` is a schedule made of others;
            for a collective with a root, ``compose(size, root, **options)``.

    The claims ``keeps_order`` to ``uniform`` are proved: the package's by its tests, a program's by
    :func:`collectives.register`.
    """

    collective: str
    name: str
    rounds: Callable[..., Iterator[Round]] | None
    summary: str = ""
    reference: str = ""
    chunks: Callable[..., int] = lambda size, **options: 1
    workspace: Callable[[int], int] = lambda size: 0
    keeps_order: bool = False
    in_place: bool = True
    uneven: bool = False
    uniform: bool = False
    compose: Callable[..., Schedule] | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def options(self) -> dict[str, Option]:
        """Names and defaults of the algorithm's own parameters."""
        function = self.compose or self.rounds
        assert function is not None, "an entry has one of them"
        given = (1 if self.compose else 2) + contract(self.collective).rooted
        parameters = list(inspect.signature(function).parameters.values())[given:]
        return {parameter.name: parameter.default for parameter in parameters}

    def schedule(self, size: int, root: int = 0, **options: Option) -> Schedule:
        """The algorithm at ``size`` ranks.

        Raises:
            UnknownAlgorithm: an option does not exist, or its value cannot be.
        """
        self.check(options, size)
        if self.compose:
            if contract(self.collective).rooted:
                return self.compose(size, root, **options)
            return self.compose(size, **options)
        assert self.rounds is not None, "an entry has one of them"
        chunks = self.chunks(size, **options)
        generate = partial(self.rounds, size=size, **options)
        if contract(self.collective).rooted:
            generate = partial(generate, root=root)
        if size == 1:
            generate = partial(_alone, self.collective, chunks)
        spelled = ",".join(f"{key}={value}" for key, value in options.items())
        return Schedule(
            self.collective,
            f"{self.name}:{spelled}" if spelled else self.name,
            size,
            chunks,
            self.workspace(size),
            self.in_place,
            generate,
            root,
        )

    def check(self, options: dict[str, Option], size: int | None = None) -> None:
        """Raises :class:`UnknownAlgorithm` for an option that does not exist at this size."""
        for key, value in options.items():
            if key not in self.options:
                nearest = hint(key, [*self.options, "segments"], "it has")
                raise UnknownAlgorithm(f"{self.name} has no option {key!r}; {nearest}")
            if isinstance(self.options[key], bool):
                if value not in (0, 1):
                    raise UnknownAlgorithm(f"{self.name}: {key}={value} must be 0 or 1")
                continue
            if type(value) is not type(self.options[key]):
                kind = "a number" if isinstance(self.options[key], int) else "a name"
                raise UnknownAlgorithm(f"{self.name}: {key}={value} must be {kind}")
            if isinstance(value, int) and size is not None and not 1 <= value <= size:
                raise UnknownAlgorithm(
                    f"{self.name}: {key}={value} must lie in 1..{size}, the number of ranks"
                )


def _alone(collective: str, chunks: int, rank: int) -> Iterator[Round]:
    """On one rank every collective is a copy, or nothing."""
    if contract(collective).result(Member(rank, 1), 0) is not None:
        yield (Copy(recvbuf[0:chunks], sendbuf[0:chunks]),)
