"""The file of the tuning table: the user's own, which ``tune`` has written, or the built-in one.

The built-in ``tuned.json`` beside this module has what is likely to hold on any machine
(``benchmarks.portable``): large buffers in the memory that the ranks of a node share.
"""

import os
from hashlib import blake2b
from pathlib import Path

import msgspec
from msgspec.structs import astuple

from collectives.calls.choice import BuiltIn, Situation, Table, tune
from collectives.errors import CollectiveError
from collectives.files import read_regular

DEFAULT = Path(__file__).with_name("tuned.json")
#: Version of the file's format.
_VERSION = 1


def users() -> Path:
    """The table that ``tune`` writes and all programs of this user read: one of each SLURM cluster,
    as clusters may share a home folder."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    cluster = os.environ.get("SLURM_CLUSTER_NAME")
    return Path(base, "collectives", f"tuned-{cluster}.json" if cluster else "tuned.json")


def source() -> Path:
    """The file that ``auto`` goes by, unless a communicator names another."""
    if named := os.environ.get("COLLECTIVES_TUNING"):
        return Path(named)
    return users() if os.path.exists(users()) else DEFAULT


def described() -> str:
    """The name of :func:`source` and a digest of its bytes, which tell tables apart."""
    named = source()
    try:
        digest = blake2b(read_regular(named), digest_size=4).hexdigest()
    except OSError as error:
        digest = f"{error.strerror}"
    return f"{'built-in' if named == DEFAULT else named} ({digest})"


#: Made once, here: threads that decode a type for the first time at once crash msgspec 0.22.
_DECODER = msgspec.json.Decoder(Table)


def load(path: str | Path | None = None) -> Table:
    """The table in ``path``; by default that of :func:`source`.

    The user's own has the built-in rules besides, which count where it has none.

    Raises:
        CollectiveError: the file cannot be read, or says what cannot be; with the place.
    """
    table = _read(Path(path or source()))
    if path is None and source() == users():
        table.entries += [BuiltIn(*astuple(one)) for one in _read(DEFAULT).entries]
    return table


def _read(source: Path) -> Table:
    try:
        table = _DECODER.decode(read_regular(source))
        if table.version != _VERSION:
            raise ValueError(
                f"it is of version {table.version}, and this program reads version {_VERSION}; "
                "measure again: python -m collectives tune"
            )
    except (OSError, ValueError, RecursionError) as error:  # msgspec's are ValueErrors
        is_deep = isinstance(error, RecursionError)
        why = "it is nested too deeply" if is_deep else getattr(error, "strerror", error)
        raise CollectiveError(f"cannot read the tuning table {source}: {why}") from None
    return table


def unmeasured(mpi: str, size: int, per_node: int) -> str:
    """The command that measures so many ranks, if they are on several nodes, for whose all-reduces
    by the library ``mpi`` the table has no rule; else nothing."""
    call = Situation(mpi, "allreduce", 0, size, per_node)
    return "" if size == per_node or load().entry(call) else tune(size, per_node)
