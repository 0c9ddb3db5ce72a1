"""Writer of checkpoints: a snapshot at once, files in a thread without MPI calls, then a rename."""

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any, Concatenate, ParamSpec

import msgspec
from mpi4py import MPI
from safetensors import SafetensorError
from safetensors.numpy import save_file

from mpitrain.arrays import Array
from mpitrain.checkpoint.folders import clean, folder_name, numbered, remove, unfinished
from mpitrain.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    Manifest,
    SavedPiece,
    digest,
    encode,
)
from mpitrain.device import HOST, Device, Later
from mpitrain.files import sync, write_whole
from mpitrain.ranks.together import by_rank_0

P = ParamSpec("P")


def _on_rank_0(method: Callable[Concatenate["Writer", P], None]) -> Callable[..., None]:
    """A method that runs on rank 0, and raises CheckpointError on all ranks if that fails."""

    @wraps(method)
    def run(self: "Writer", *given: P.args, **named: P.kwargs) -> None:
        def act() -> None:
            try:
                method(self, *given, **named)
            except (OSError, CheckpointError) as error:
                where = getattr(error, "filename", None)
                why = f"{getattr(error, 'strerror', None) or error}{f': {where}' if where else ''}"
                raise CheckpointError(
                    f"cannot write a checkpoint to {self.folder}: {why}; those before it are "
                    "intact, and train --resume goes on from the newest when that is put right"
                ) from error

        by_rank_0(self._comm, act, CheckpointError)

    return run


class Writer:
    """Writes the checkpoints of a run, one at a time.

    All methods are collective, and raise CheckpointError on all ranks if one cannot write.

    Attributes:
        folder: folder of the checkpoints.
        last: step of the last one that was begun, best tests excluded.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        folder: Path,
        *,
        keep: int,
        background: bool = True,
        device: Device = HOST,
    ) -> None:
        """Writes nothing yet.

        Args:
            comm: the ranks of the run.
            folder: folder of the checkpoints; may be a link.
            keep: number of newest whole ones that stay.
            background: whether training goes on while files are written.
            device: device of the arrays.
        """
        self._comm = comm
        self.folder = folder
        self.last: int | None = None
        self._keep = keep
        self._background = background
        self._resumed: int | None = None
        self._device = device
        #: Steps of checkpoints that are known to be whole.
        self._whole = set[int]()
        self._thread: Thread | None = None
        self._pending: tuple[Manifest, Path] | None = None
        self._written: str | OSError = ""
        self._lasted = 0.0

    @_on_rank_0
    def prepare(self) -> None:
        """Makes the folder, so that a run that cannot write there ends before its first step.

        Cleans it, too: a checkpoint that a killed run has left whole can be read from then on.
        """
        self._make_folder()
        clean(self.folder)

    def go_on(self, step: int) -> None:
        """Keeps the checkpoint after ``step``, from which this run goes on."""
        self._resumed = step
        self._whole.add(step)

    def begin(
        self,
        step: int,
        arrays: Mapping[str, Array],
        pieces: Sequence[SavedPiece],
        manifest: Manifest,
        *,
        best: bool = False,
    ) -> tuple[Path, float] | None:
        """Begins to write a checkpoint, after the last one is complete; returns as :meth:`poll`.

        Args:
            step: step for the name.
            arrays: this rank's arrays by key.
            pieces: their places; ``file`` is filled in here.
            manifest: the rest; pieces and digests are filled in here.
            best: it is of the best test: it replaces the last such one, and is none of the newest.
        """
        self.finish()
        if not best:
            self.last = step
        start = perf_counter()
        target = self.folder / folder_name(step, best=best)
        beside = unfinished(target)
        self._make(beside)
        snapshot = {key: self._device.snapshot(array) for key, array in arrays.items()}
        file = f"rank-{self._comm.rank:05d}.safetensors"
        own = [msgspec.structs.replace(piece, file=file) for piece in pieces]
        self._pending = msgspec.structs.replace(manifest, pieces=own), target
        self._thread = Thread(target=self._write, args=(snapshot, beside / file))
        self._lasted = perf_counter() - start
        self._thread.start()
        return None if self._background else self.finish()

    @_on_rank_0
    def keep_constants(self, name: str, give: Callable[[], Mapping[str, Any]]) -> None:
        """Writes torch tensors that rank 0 gives, a run's constants, beside the checkpoints, once.

        ``name`` depends on the contents.
        """
        path = self.folder / name
        if path.exists():
            return
        from safetensors.torch import save_file as save_tensors
        from torch import contiguous_format

        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            found = {
                key: one.cpu().clone(memory_format=contiguous_format) for key, one in give().items()
            }
            write_whole(path, lambda beside: save_tensors(found, beside))
        except SafetensorError as error:
            raise OSError(None, str(error), str(path)) from error

    def poll(self) -> tuple[Path, float] | None:
        """Completes the checkpoint if all files are written; its folder and seconds, or None."""
        if self._thread is None:
            return None
        done = not self._thread.is_alive()
        return self.finish() if self._comm.allreduce(done, op=MPI.LAND) else None

    def finish(self) -> tuple[Path, float] | None:
        """Waits for the files, writes the manifest and renames the folder; see :meth:`poll`."""
        if self._thread is None or self._pending is None:
            return None
        self._thread.join()
        lasted = self._lasted - perf_counter()
        (manifest, target), self._thread, self._pending = self._pending, None, None
        if isinstance(self._written, OSError):
            outcome: tuple[str, Any] = ("", f"{self._written.strerror}: {self._written.filename}")
        else:
            outcome = (self._written, manifest)
        found = self._comm.gather(outcome)
        self._complete(found, target)
        return target, self._comm.allreduce(lasted + perf_counter(), op=MPI.MAX)

    def abandon(self) -> None:
        """Drops the checkpoint that is being written, as a rank has died; not collective."""
        if self._thread is not None:
            self._thread.join()

    def _write(self, arrays: dict[str, Later], path: Path) -> None:
        start = perf_counter()  # a thread of a virtual rank has another clock than the rank
        try:
            found = {key: later.get() for key, later in arrays.items()}
            write_whole(path, lambda beside: save_file(found, beside))
            self._written = digest(path)
        except OSError as error:
            self._written = error
        except Exception as error:  # safetensors has errors of its own for a full disk
            self._written = OSError(None, str(error), str(path))
        self._lasted += perf_counter() - start

    @_on_rank_0
    def _complete(self, found: Any, target: Path) -> None:
        broken = [f"rank {rank}: {why}" for rank, (sha, why) in enumerate(found) if not sha]
        beside = unfinished(target)
        if broken:
            shutil.rmtree(beside, ignore_errors=True)
            raise OSError(None, "; ".join(broken[:3]))
        first = found[0][1]
        whole = msgspec.structs.replace(
            first,
            progress=msgspec.structs.replace(
                first.progress,
                left_out={name: n for _, own in found for name, n in own.progress.left_out.items()},
            ),
            digests={f"rank-{rank:05d}.safetensors": sha for rank, (sha, _) in enumerate(found)},
            pieces=[piece for _, own in found for piece in own.pieces],
            shapes={name: shape for _, own in found for name, shape in own.shapes.items()},
            dtypes={name: kind for _, own in found for name, kind in own.dtypes.items()},
            state=[name for _, own in found for name in own.state],
        )
        write_whole(beside / MANIFEST, lambda path: path.write_bytes(encode(whole)))
        sync(beside)
        if target.is_symlink() or _is_ours(target):
            remove(target, beside)
        elif target.exists():
            raise OSError(None, "it is in the way, and is no checkpoint; move it", str(target))
        else:
            beside.rename(target)
        sync(self.folder)
        if target in (best := numbered(self.folder, best=True)).values():
            # The new one has its name on disk: whenever a run is killed, a whole one is there.
            self._remove(path for path in best.values() if path != target)
        else:
            self._whole.add(whole.progress.step)
            self._retain()

    def _retain(self) -> None:
        """Removes checkpoints that are older than the ``keep`` newest whole ones."""
        there = numbered(self.folder)
        kept = [step for step in there if step in self._whole][: self._keep]
        if len(kept) < self._keep:
            return
        self._remove(
            path for step, path in there.items() if step < kept[-1] and step != self._resumed
        )

    def _remove(self, paths: Iterable[Path]) -> None:
        for path in filter(_is_ours, paths):
            with suppress(OSError):
                remove(path)

    @_on_rank_0
    def set_aside(self) -> None:
        """Moves an earlier run's checkpoints to the folder ``earlier`` inside; replaces those."""
        there = list(filter(_is_ours, _all(self.folder)))
        if not there:
            return
        earlier = self.folder / "earlier"
        earlier.mkdir(mode=0o700, exist_ok=True)
        for path in filter(_is_ours, _all(earlier)):
            remove(path)
        # Oldest first: if this is interrupted, the newest is still in its place.
        for path in reversed(there):
            path.rename(earlier / path.name)

    @_on_rank_0
    def drop(self, after: int) -> None:
        """Removes the checkpoints of later steps than ``after``, which come again."""
        self._whole = {step for step in self._whole if step <= after}
        self._remove(path for step, path in numbered(self.folder).items() if step > after)

    def _make_folder(self) -> None:
        if self.folder.is_symlink() and not self.folder.exists():
            why = f"{self.folder.readlink()} is not there, to which it is a link; make that folder"
            raise OSError(errno.ENOENT, why, str(self.folder))
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, "nothing can be written there", str(self.folder))

    @_on_rank_0
    def _make(self, beside: Path) -> None:
        self._make_folder()
        clean(self.folder)
        beside.mkdir(mode=0o700)


def _all(folder: Path) -> list[Path]:
    """Folders of checkpoints: the best test's first, then the newest ones."""
    return [path for best in (True, False) for path in numbered(folder, best=best).values()]


def _is_ours(path: Path) -> bool:
    """Whether a run wrote this folder; others of such a name are left alone."""
    return not path.is_symlink() and (path / MANIFEST).is_file()
