"""The messages and collectives under way on a communicator of virtual ranks."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI as library

from collectives.virtual.messages import MessageEnd
from collectives.virtual.rank import Operation, here


class Context:
    """The messages and collectives under way on a communicator, which its ranks share.

    Attributes:
        members: their numbers in the job.
        numbers: the reverse.
        sends, receives: ends without the other end, by the rank that receives, oldest first.
        groups: contexts of members that make a communicator of their own, and by a name those of
            all of them whose messages are apart.
        topology: by rank, its place in a grid or graph, in the words of its class.
        ours: the communicators whose algorithms serve these ranks.
        called, locals: by rank, its recorded calls' numbers, and MPI's communicator of it alone.
    """

    def __init__(self, members: Sequence[int], topology: dict[int, Any] | None = None) -> None:
        self.members = tuple(members)
        self.numbers = {rank: number for number, rank in enumerate(members)}
        self.sends: list[deque[MessageEnd]] = [deque() for _ in members]
        self.receives: list[deque[MessageEnd]] = [deque() for _ in members]
        self.groups: dict[Any, Context] = {}
        self.topology: dict[int, Any] = dict(topology or {})
        self.ours: dict[int, Any] = {}
        self.called: dict[int, Any] = {}
        self.locals: dict[int, Any] = {}
        self._met = [0] * len(self.members)
        #: By turn: the name, and by member the part and the operation.
        self._meetings: dict[int, tuple[str, dict[int, tuple[Any, Operation]]]] = {}

    def apart(self, name: Any, members: Sequence[int] | None = None) -> "Context":
        """The context of this name among ``members``, by default all."""
        return self.groups.setdefault(name, Context(self.members if members is None else members))

    def __reduce__(self) -> Any:
        raise ValueError("no communicator can be pickled but a constant of MPI")

    def meet(
        self,
        what: str,
        brought: Any,
        finish: Callable[[Any, int], Any],
        shared: Callable[[list[Any]], Any] = lambda parts: parts,
        share: float = 1.0,
    ) -> Operation:
        """A collective of the library begins on this rank.

        Args:
            what: its name, the same on all ranks.
            brought: this rank's part; bytes and arrays count in the time.
            finish: from ``shared(parts)`` of all parts and this rank's number to its result.
            share: part of the bytes of all parts that passes the link of one rank.

        Raises:
            RuntimeError: another rank makes another call.
        """
        rank = here()
        now, own = rank.arrive(), self.numbers[rank.number]
        turn = self._met[own]
        self._met[own] += 1
        first, came = self._meetings.setdefault(turn, (what, {}))
        if first != what:
            raise RuntimeError(
                f"rank {rank.number} calls {what} where rank {self.members[next(iter(came))]} has "
                f"called {first}, the collective number {turn + 1} of this communicator"
            )

        def missing() -> list[int]:
            return [other for number, other in enumerate(self.members) if number not in came]

        pending = Operation(f"is in {what}", missing, result=finish)
        came[own] = brought, pending
        if len(came) == len(self.members):
            del self._meetings[turn]
            parts = [came[number][0] for number in range(len(came))]
            given = shared(parts)
            counted = (len(part) for part in parts if isinstance(part, bytes | np.ndarray))
            nbytes = share * sum(counted)
            for number, (_, one) in came.items():
                try:
                    one.result = one.result(given, number)
                except library.Exception as error:
                    one.error = error
            end = now + rank.cluster.links.meeting(self.members, nbytes) + rank.all_s() / len(came)
            for number, (_, one) in came.items():
                one.begun, one.end = now, end
                rank.cluster.ranks[self.members[number]].note(end, one)
        return pending


def folded(parts: Sequence[Any], join: Callable[[Any, Any], Any]) -> Any:
    """The sum of all parts in the order of recursive doubling."""
    extra = len(parts) - (1 << (len(parts).bit_length() - 1))
    return joined([*_pairs(parts[: 2 * extra], join), *parts[2 * extra :]], join)


def joined(parts: Sequence[Any], join: Callable[[Any, Any], Any]) -> Any:
    """The sum of all parts in the order of a binomial tree, as mpi4py's of objects."""
    while len(parts) > 1:
        parts = _pairs(parts, join)
    return parts[0]


def _pairs(parts: Sequence[Any], join: Callable[[Any, Any], Any]) -> list[Any]:
    """Sums of neighbours, and a last part that has none."""
    both = [join(*parts[at : at + 2]) for at in range(0, len(parts) - 1, 2)]
    return [*both, *parts[2 * len(both) :]]
