"""Writing: a snapshot at once, files in a thread that makes no MPI call, at last the rename."""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any

import msgspec
from mpi4py import MPI
from safetensors.numpy import save_file

from mpitrain.checkpoint.manifest import MANIFEST, CheckpointError, Manifest, Piece, digest
from mpitrain.nn import Array


class Writer:
    """Writes the checkpoints of a run, one at a time.  All methods are collective.

    Attributes:
        folder: where they go.
        last: the step of the last one that was begun.
    """

    def __init__(
        self, comm: MPI.Intracomm, folder: Path, *, keep: int, background: bool = True
    ) -> None:
        """``keep`` newest ones stay; ``background``: training goes on while files are written."""
        self._comm = comm
        self.folder = folder
        self.last: int | None = None
        self._keep = keep
        self._background = background
        self._thread: Thread | None = None
        self._pending: tuple[Manifest, Path, float] | None = None
        self._written: str | OSError = ""

    def begin(
        self,
        step: int,
        arrays: Mapping[str, Array],
        pieces: Sequence[Piece],
        manifest: Manifest,
    ) -> None:
        """Start to write a checkpoint, after the one before is complete.

        Args:
            step: for its name.
            arrays: the own pieces by key; copied at once.
            pieces: what they are; ``file`` is filled in here.
            manifest: the rest; pieces and digests are filled in here.

        Raises:
            CheckpointError: on all ranks, if the folder cannot be made, or the one before failed.
        """
        self.finish()
        self.last = step
        start = perf_counter()
        target = self.folder / f"step-{step:08d}"
        unfinished = self.folder / f".{target.name}.unfinished"
        self._together(lambda: self._make(unfinished))
        snapshot = {key: array.copy() for key, array in arrays.items()}
        file = f"rank-{self._comm.rank:05d}.safetensors"
        own = [msgspec.structs.replace(piece, file=file) for piece in pieces]
        self._pending = (msgspec.structs.replace(manifest, pieces=own), target, start)
        self._thread = Thread(target=self._write, args=(snapshot, unfinished / file))
        self._thread.start()
        if not self._background:
            self.finish()

    def poll(self) -> tuple[Path, float] | None:
        """Complete the checkpoint if all files are written: its folder, and the seconds it took."""
        if self._thread is None:
            return None
        done = not self._thread.is_alive()
        return self.finish() if self._comm.allreduce(done, op=MPI.LAND) else None

    def finish(self) -> tuple[Path, float] | None:
        """Wait for the files, write the manifest, and give the folder its name.

        Raises:
            CheckpointError: on all ranks, if one of them could not write.
        """
        if self._thread is None or self._pending is None:
            return None
        self._thread.join()
        (manifest, target, start), self._thread, self._pending = self._pending, None, None
        if isinstance(self._written, OSError):
            outcome: tuple[str, Any] = ("", f"{self._written.strerror}: {self._written.filename}")
        else:
            outcome = (self._written, manifest)
        found = self._comm.gather(outcome)
        self._together(lambda: self._complete(found, target))
        return target, perf_counter() - start

    def abandon(self) -> None:
        """Leave the checkpoint that is being written, as a rank has died; not collective."""
        if self._thread is not None:
            self._thread.join()

    def _write(self, arrays: dict[str, Array], path: Path) -> None:
        try:
            save_file(arrays, path)
            _sync(path)
            self._written = digest(path)
        except OSError as error:
            self._written = error
        except Exception as error:  # safetensors has errors of its own for a full disk
            self._written = OSError(None, str(error), str(path))

    def _complete(self, found: Any, target: Path) -> None:
        broken = [f"rank {rank}: {why}" for rank, (sha, why) in enumerate(found) if not sha]
        unfinished = target.with_name(f".{target.name}.unfinished")
        if broken:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise OSError(None, "; ".join(broken[:3]))
        first = found[0][1]
        whole = msgspec.structs.replace(
            first,
            digests={f"rank-{rank:05d}.safetensors": sha for rank, (sha, _) in enumerate(found)},
            pieces=[piece for _, own in found for piece in own.pieces],
            shapes={name: shape for _, own in found for name, shape in own.shapes.items()},
            dtypes={name: kind for _, own in found for name, kind in own.dtypes.items()},
        )
        path = unfinished / MANIFEST
        path.write_bytes(msgspec.json.encode(whole))
        _sync(path)
        _sync(unfinished)
        shutil.rmtree(target, ignore_errors=True)
        unfinished.rename(target)
        _sync(self.folder)
        for old in sorted(self.folder.glob("step-*"))[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)

    def set_aside(self) -> None:
        """Move an earlier run's checkpoints away, so that none of them is taken for this run's.

        Raises:
            CheckpointError: on all ranks.
        """
        self._together(self._set_aside)

    def _set_aside(self) -> None:
        if any(self.folder.glob("step-*")):
            earlier = self.folder.with_name(f"{self.folder.name}.earlier")
            if earlier.exists():
                shutil.rmtree(earlier)
            self.folder.rename(earlier)

    def _make(self, unfinished: Path) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Left by a run that was killed while it wrote.
        for left in self.folder.glob(".step-*.unfinished"):
            shutil.rmtree(left, ignore_errors=True)
        unfinished.mkdir(mode=0o700)

    def _together(self, act: Callable[[], None]) -> None:
        """Act on rank 0; if that fails, raise on all ranks."""
        why = None
        if self._comm.rank == 0:
            try:
                act()
            except OSError as error:
                why = f"{error.strerror or error}" + (
                    f": {error.filename}" if error.filename else ""
                )
        why = self._comm.bcast(why)
        if why is not None:
            raise CheckpointError(
                f"cannot write a checkpoint to {self.folder}: {why}; those before it are intact"
            )


def _sync(path: Path) -> None:
    """What is in a file, or which files are in a folder, survives a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
