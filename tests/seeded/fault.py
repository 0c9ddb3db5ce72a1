"""A fault: a change of one place, as a wait dropped, a tag swapped, an index off by one."""

from typing import NamedTuple


class Fault(NamedTuple):
    """``old``, which ``path`` has exactly once, becomes ``new``; ``near`` has tests that notice."""

    name: str
    near: str
    path: str
    old: str
    new: str
