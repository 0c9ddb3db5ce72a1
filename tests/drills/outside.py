"""Faults around a job: its disk."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Protocol

_DISK_BYTES = 64 << 20
_BUSY_S = 10.0


class Outside(Protocol):
    """Something around a job that can break, and be mended."""

    def missing(self) -> str:
        """Why this machine cannot do it, or nothing."""

    def around(self, run: Path) -> AbstractContextManager[None]:
        """Context of a job that runs in a folder."""

    def strike(self, run: Path) -> None:
        """Break it."""

    def mend(self, run: Path) -> None:
        """As before."""


class Disk:
    """A small disk of a run's own for its checkpoints, in memory; to mount it needs root."""

    def __init__(self, kind: str) -> None:
        self._full = kind == "full"

    def missing(self) -> str:
        if os.geteuid() != 0:
            return "mounting a disk needs root"
        if not shutil.which("mount"):
            return "there is no mount"
        try:
            with tempfile.TemporaryDirectory() as folder, self.around(Path(folder)):
                return ""
        except subprocess.CalledProcessError as error:  # root of a container may not
            return f"no disk can be mounted: {error.stderr.decode(errors='replace').strip()}"

    @contextmanager
    def around(self, run: Path) -> Iterator[None]:
        folder = _folder(run)
        folder.mkdir(parents=True, exist_ok=True)
        call("mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "mpitrain-drills", str(folder))
        try:
            yield
        finally:
            call("umount", "--lazy", str(folder))

    def strike(self, run: Path) -> None:
        if not self._full:
            self._close(run)
            return
        with (_folder(run) / "filler").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1 << 16))
            except OSError:
                return

    def _close(self, run: Path) -> None:
        """The system refuses while a checkpoint is being written."""
        deadline = monotonic() + _BUSY_S
        while True:
            try:
                call("mount", "-o", "remount,ro", str(_folder(run)))
                return
            except subprocess.CalledProcessError:
                if monotonic() > deadline:
                    raise
                sleep(0.001)

    def mend(self, run: Path) -> None:
        if self._full:
            (_folder(run) / "filler").unlink(missing_ok=True)
        else:
            call("mount", "-o", "remount,rw", str(_folder(run)))


def _folder(run: Path) -> Path:
    return run / "checkpoints"


def call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
