"""A server's order of service: that of the workers' turns or of a log, and written down."""

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from mpitrain.config import ConfigError
from mpitrain.server.service_log import Begun, Log, Pull, Push, Replayed, name, remove_others
from mpitrain.server.service_order import Logged, RoundRobin, Turns


def check_folders(replay: str, folder: Path) -> None:
    """Refuse to replay a run into its own folder.

    Raises:
        ConfigError: with what to do.
    """
    if replay and Path(replay).resolve() == folder.resolve():
        raise ConfigError(
            f"server.replay = {replay!r} is this run's own run.dir, whose log it would replace; "
            "set another run.dir"
        )


class Order:
    """The order of one server, from meeting to meeting."""

    def __init__(self, folder: Path, replay: str, begun: Begun) -> None:
        """Read the log that is to be replayed.

        Args:
            folder: of the run.
            replay: folder of the run that is replayed, or empty.
            begun: who serves.

        Raises:
            ConfigError: the log cannot be read, or is of another training.
        """
        self._folder = folder
        self._begun = begun
        self._log: Log | None = None
        self._replayed: Replayed | None = None
        if replay:
            self._replayed = Replayed(Path(replay) / name(begun.server))
            self._replayed.expect(begun)

    def turns(self, first: int, stop: int) -> Turns:
        """For the batches ``first <= i < stop``; at the first call, the own log begins.

        Raises:
            ConfigError: the log that is replayed does not have them.
            LogError: the own log cannot be written.
        """
        if self._log is None:
            if self._begun.server == 0 and first == 0:
                remove_others(self._folder, self._begun.servers)
            path = self._folder / name(self._begun.server)
            self._log = Log(path, replace(self._begun, step=first))
        if self._replayed:
            return Logged(self._replayed.window(first, stop), str(self._replayed.path))
        return RoundRobin(self._begun.workers)

    def write(self, first: int, stop: int, events: Sequence[Pull | Push]) -> None:
        """What was served.

        Raises:
            LogError: it cannot be written.
        """
        if self._log:
            self._log.add(first, stop, events)

    def close(self) -> None:
        """Nothing more is served."""
        if self._log:
            self._log.close()
