"""Processes of this machine, as ``/proc`` describes them."""

from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """One process.

    Attributes:
        number: the process id; another process may get it later.
        name: name of its program, as the system cuts it.
        state: letter of its state; ``Z`` and ``X`` have ended.
        parent: the parent's process id.
        began: start time in the system's ticks, which tells apart two processes of one number.
    """

    number: int
    name: str
    state: str
    parent: int
    began: str

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, even if its parent has not waited for it yet."""
        return self.state in "ZX"


def find(number: int) -> Process | None:
    """The process of this number; ``None`` if there is none."""
    try:
        # A name is cut at 15 bytes, maybe within a letter.
        text = Path(f"/proc/{number}/stat").read_text("utf-8", errors="replace")
    except OSError:
        return None
    # The name may hold spaces and parentheses.
    before, _, rest = text.rpartition(")")
    fields = rest.split()
    return Process(number, before.partition("(")[2], fields[0], int(fields[1]), fields[19])
