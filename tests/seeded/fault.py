"""A fault: a change of one place, as a wait dropped, a tag swapped, an index off by one."""

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Fault(NamedTuple):
    """``old``, which ``path`` has exactly once, becomes ``new``; ``near`` is what notices."""

    name: str
    near: str
    path: str
    old: str
    new: str

    def text(self, root: Path = ROOT) -> str:
        """The file with the fault in it."""
        text = (root / self.path).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.path} has {text.count(self.old)} such places")
        return text.replace(self.old, self.new)
