"""What ``auto`` has found by turns: a small file in the user's cache folder.

Written as a whole and put in its place at once, so that no reader sees a part; of two jobs that
write at the same time, one's last finding may be lost, and is found again.
"""

import logging
import os
import platform
from datetime import date
from pathlib import Path
from typing import Annotated

import msgspec

from collectives.files import replace

log = logging.getLogger("collectives")

_VERSION = 1
#: Of findings; the oldest go.
_MOST = 1000


class Kind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A kind of call: what it has in common with others that are as fast by the same algorithm.

    Attributes:
        mpi: the library (:func:`collectives.calls.library.library`).
        memory: as in :class:`collectives.calls.tuner.Situation`.
        dtype: of a reduction's items.
        log2_bytes: of the larger buffer, rounded down.
    """

    mpi: str
    collective: str
    memory: str
    dtype: str
    log2_bytes: int
    ranks: int
    ranks_per_node: int

    def __str__(self) -> str:
        of = f" of {self.dtype}" if self.dtype else ""
        nodes = "" if self.ranks == self.ranks_per_node else f", {self.ranks_per_node} a node"
        return (
            f"{self.collective}{of}, 2^{self.log2_bytes} bytes, {self.memory}, {self.ranks} ranks"
            f"{nodes}, {self.mpi}"
        )


class Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was found of a kind of call.

    Attributes:
        ours: the algorithm that took turns with native.
        algorithm: the one that was kept: ``ours`` or native.
        ratio: native's time over that of ours.
        host: where; of several, that of rank 0.
    """

    kind: Kind
    ours: str
    algorithm: str
    ratio: Annotated[float, msgspec.Meta(gt=0)]
    host: str = msgspec.field(default_factory=platform.node)
    day: str = msgspec.field(default_factory=lambda: date.today().isoformat())


class _File(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    kept: list[Kept]


def where() -> Path:
    """The file: ``$XDG_CACHE_HOME/collectives/turns.json``, or below ``~/.cache``."""
    folder = os.environ.get("XDG_CACHE_HOME", "").strip() or "~/.cache"
    return Path(os.path.expanduser(folder)) / "collectives" / "turns.json"


def findings() -> list[Kept]:
    """All that is remembered, the newest last; a file that cannot be read has nothing."""
    path = where()
    try:
        if not path.is_file():
            return []
        found = msgspec.json.decode(path.read_bytes(), type=_File)
        if found.version != _VERSION:
            raise ValueError(f"it is of version {found.version}, and this is {_VERSION}")
    except (OSError, ValueError, RecursionError) as error:  # msgspec's are ValueErrors
        log.warning("%s cannot be read (%s); collectives turns --forget removes it", path, error)
        return []
    return found.kept


def recall(kind: Kind) -> Kept | None:
    """What was found of a kind of call on this host."""
    here = platform.node()
    fitting = (one for one in reversed(findings()) if (one.kind, one.host) == (kind, here))
    return next(fitting, None)


def remember(found: Kept) -> None:
    """Adds a finding in the place of earlier ones of its kind; where that cannot be, the log says
    so."""
    path = where()
    others = [one for one in findings() if (one.kind, one.host) != (found.kind, found.host)]
    content = msgspec.json.encode(_File(_VERSION, [*others, found][-_MOST:]))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, msgspec.json.format(content, indent=1).decode())
    except OSError as error:
        log.warning("what auto found by turns is not remembered: %s: %s", path, error)


def forget() -> int:
    """Removes the file; how many findings it had."""
    number = len(findings())
    where().unlink(missing_ok=True)
    return number
