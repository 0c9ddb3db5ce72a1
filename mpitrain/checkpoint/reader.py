"""Reading: the newest checkpoint that is whole, and any tensor of it."""

import re
from collections import defaultdict
from pathlib import Path

import numpy as np
from mpi4py import MPI
from safetensors import SafetensorError, safe_open

from mpitrain.checkpoint.manifest import CheckpointError, Manifest, Piece, digest, read
from mpitrain.nn import Array

_FOLDER = re.compile(r"step-\d{8,}")


class Checkpoint:
    """A checkpoint whose files are what its manifest says.

    Attributes:
        folder: of it.
        manifest: of it.
    """

    def __init__(self, folder: Path) -> None:
        """Read the manifest; ``CheckpointError`` if there is none that can be read."""
        self.folder = folder
        self.manifest: Manifest = read(folder)
        self._pieces: dict[tuple[str, str], list[Piece]] = defaultdict(list)
        for piece in self.manifest.pieces:
            self._pieces[piece.section, piece.tensor].append(piece)

    @property
    def sections(self) -> set[str]:
        """``parameters`` and the slots of the optimiser."""
        return {section for section, _ in self._pieces}

    def verify(self, rank: int = 0, size: int = 1) -> None:
        """Compare the digests of every ``size``-th file, beginning with number ``rank``.

        Raises:
            CheckpointError: naming the first file that is missing or not what was written.
        """
        for file in sorted(self.manifest.digests)[rank::size]:
            path = self.folder / file
            try:
                found = digest(path)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
            if found != self.manifest.digests[file]:
                raise CheckpointError(f"{path} is not what was written: its digest differs")

    def tensor(self, section: str, name: str) -> Array:
        """A tensor, whole.

        Raises:
            CheckpointError: it is not in the checkpoint, or not all of it.
        """
        pieces = self._pieces.get((section, name))
        if not pieces:
            raise CheckpointError(f"{self.folder} has no {section} of {name}")
        shape = self.manifest.shapes[name]
        whole = np.empty(shape, self.manifest.dtypes[name])
        missing = np.ones(shape, bool)
        for piece in pieces:
            part: list[slice] = [slice(None)] * len(shape)
            if piece.axis >= 0:
                part[piece.axis] = slice(piece.low, piece.high)
            # Elements of the part, as indices of the whole.
            index = np.arange(whole.size).reshape(shape)[tuple(part)].ravel()
            where = index[piece.start : piece.start + piece.size]
            whole.reshape(-1)[where] = self._read(piece)
            missing.reshape(-1)[where] = False
        if missing.any():
            raise CheckpointError(
                f"{self.folder} has {missing.sum()} elements too few of {section} of {name}"
            )
        return whole

    def _read(self, piece: Piece) -> Array:
        path = self.folder / piece.file
        try:
            with safe_open(path, framework="numpy") as file:
                found: Array = file.get_tensor(piece.key)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: {piece.key} cannot be read: {error}") from error
        if found.shape != (piece.size,):
            raise CheckpointError(
                f"{path}: {piece.key} has shape {found.shape}, not ({piece.size},)"
            )
        return found


def newest(comm: MPI.Intracomm, folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint in ``folder`` that is whole, and why newer ones were refused.

    Collective; every rank compares the digests of its share of the files.
    """
    names = None
    if comm.rank == 0:
        found = folder.iterdir() if folder.is_dir() else ()
        names = sorted((p.name for p in found if _FOLDER.fullmatch(p.name)), reverse=True)
    refused: list[str] = []
    for name in comm.bcast(names):
        why = None
        try:
            checkpoint = Checkpoint(folder / name)
            checkpoint.verify(comm.rank, comm.size)
        except CheckpointError as error:
            why = str(error)
        reasons = [reason for reason in comm.allgather(why) if reason]
        if not reasons:
            return checkpoint, refused
        refused.append(reasons[0])
    return None, refused
