"""Symbolic value of a chunk, its origin, and the text of both for the verifier's errors."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from collectives.algorithms.guard import flaw
from collectives.schedule import Schedule, Step


class Expression(NamedTuple):
    """A partial reduction of one chunk.

    Attributes:
        chunk: the chunk of ``sendbuf`` that all its leaves come from.
        ranks: bit r is set if rank r's contribution is in it.
        tree: number of its tree, equal for trees that differ only in the order of two operands.
        ordered: its leaves, read from left to right, are consecutive ranks.
    """

    chunk: int
    ranks: int
    tree: int
    ordered: bool

    def __str__(self) -> str:
        return f"chunk {self.chunk} of ranks {sorted(members(self.ranks))}"


class Arrival(NamedTuple):
    """A message: its values, and the sender's step in its round ``number``."""

    sender: int
    number: int
    step: Step
    values: list[Expression]

    @property
    def origin(self) -> str:
        """The sender and its chunk, without the values."""
        return f"rank {self.sender}, whose round {self.number} sends {self.step.chunk}"

    def __str__(self) -> str:
        return f"{self.origin} = {', '.join(map(str, self.values))}"


def members(ranks: int) -> Iterator[int]:
    """The ranks whose bits are set."""
    return (rank for rank in range(ranks.bit_length()) if ranks >> rank & 1)


def spelled(trees: Mapping[tuple[int, int], int], expression: Expression) -> str:
    """The order of a reduction: ``((0+1)+2)`` for ranks 0, 1 and 2.

    Args:
        trees: the number of each pair of trees; a leaf is the pair of -1 - rank and -1 - chunk.
    """
    parts = {number: pair for pair, number in trees.items()}

    def of(tree: int) -> str:
        left, right = parts[tree]
        if left < 0:
            return str(-2 - left - right - expression.chunk)
        return f"({of(left)}+{of(right)})"

    return of(expression.tree)


def malformed(schedule: Schedule) -> str:
    """Error text for the first malformed round; empty if there is none."""
    for rank in range(schedule.size):
        for number, steps in enumerate(schedule.rounds(rank)):
            if why := flaw(steps):
                return f"{schedule}: rank {rank} round {number}: {why}"
    return ""
