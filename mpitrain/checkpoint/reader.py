"""Reader of checkpoints: the newest whole one, and any tensor of it."""

from collections import defaultdict
from collections.abc import Mapping
from copy import copy
from math import inf
from pathlib import Path

import numpy as np
from mpi4py import MPI
from msgspec.structs import replace
from safetensors import SafetensorError, safe_open

from mpitrain.arrays import Array
from mpitrain.checkpoint.folders import numbered, step_of
from mpitrain.checkpoint.manifest import (
    EXCHANGE_STATE,
    CheckpointError,
    Manifest,
    SavedPiece,
    Unreadable,
    digest,
    job_of,
    read,
)
from mpitrain.config import Config
from mpitrain.group import cut
from mpitrain.ranks.together import by_rank_0
from mpitrain.update.updater import AVERAGE

#: Names of types in safetensors.
_TYPES = {"float32": "F32", "float64": "F64"}


class CheckpointReader:
    """A checkpoint on disk.

    Attributes:
        folder: the checkpoint's folder.
        manifest: its manifest.
        job: the configuration of the job that wrote it.
    """

    def __init__(self, folder: Path) -> None:
        """Reads the manifest; ``CheckpointError`` if that fails."""
        self.folder = folder
        manifest = read(folder)
        self.job: Config = job_of(manifest)
        named, step = step_of(folder.name), manifest.progress.step
        if named is not None and named != step:
            raise CheckpointError(f"{folder} has a manifest of step {step}")
        self._take(manifest)

    def _take(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._pieces: dict[tuple[str, str], list[SavedPiece]] = defaultdict(list)
        self._in_file: dict[str, list[SavedPiece]] = defaultdict(list)
        for piece in self.manifest.pieces:
            self._pieces[piece.section, piece.tensor].append(piece)
            self._in_file[piece.file].append(piece)

    def renamed(self, names: Mapping[str, str]) -> "CheckpointReader":
        """The checkpoint with this run's ``names`` of the tensors of a torch module, by entries of
        its ``state_dict``: another run may have cut the module elsewhere."""
        then = self.manifest
        now: dict[str, str] = {}
        for own, name in then.names.items():
            if name in then.shapes and own in names:  # else it was a constant, or is one
                now.setdefault(name, names[own])

        def new(name: str) -> str:
            """Also of a worker's count, ``tensor@1``, and of a codec's array, ``tensor.q``."""
            end = len(name) if name in now else max(name.rfind("@"), name.rfind("."), 0)
            return now.get(name[:end], name[:end]) + name[end:]

        every = list(map(new, then.shapes))
        if every == list(then.shapes) or len(set(every)) < len(every):
            return self
        found = copy(self)
        counts = {new(name): count for name, count in then.progress.left_out.items()}
        found._take(
            replace(
                then,
                progress=replace(then.progress, left_out=counts),
                shapes=dict(zip(every, then.shapes.values(), strict=True)),
                dtypes={new(name): kind for name, kind in then.dtypes.items()},
                pieces=[replace(piece, tensor=new(piece.tensor)) for piece in then.pieces],
                state=list(map(new, then.state)),
                names={own: new(name) for own, name in then.names.items()},
            )
        )
        return found

    @property
    def sections(self) -> set[str]:
        """``parameters``, slots of the optimiser, ``average``, and ``exchange.`` with a name."""
        return {section for section, _ in self._pieces}

    @property
    def names(self) -> list[str]:
        """Names of the model's parameters and layers' other arrays."""
        others = set(self.named(EXCHANGE_STATE))
        return [name for name in self.manifest.shapes if name not in others]

    def named(self, section: str) -> list[str]:
        """Names of the tensors in a section."""
        return [name for found, name in self._pieces if found == section]

    def verify(self, rank: int = 0, size: int = 1) -> None:
        """Checks digest and header of every ``size``-th file from number ``rank`` on.

        CheckpointError: a file is missing or differs.
        """
        for file in sorted(self.manifest.digests)[rank::size]:
            path = self.folder / file
            try:
                found = digest(path)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
            if found != self.manifest.digests[file]:
                raise CheckpointError(f"{path} is not what was written: its digest differs")
            self._check_header(file)

    def value(self, name: str) -> Array:
        """Value for tests: a parameter, its average, or a layer's other array."""
        if name in self.manifest.state:
            return self.tensor("state", name)
        return self.tensor(AVERAGE if AVERAGE in self.sections else "parameters", name)

    def tensor(self, section: str, name: str) -> Array:
        """A whole tensor of a section; CheckpointError: it is not there, or not all of it."""
        pieces = self._pieces.get((section, name))
        if not pieces:
            raise CheckpointError(f"{self.folder} has no {section} of {name}")
        shape = self.manifest.shapes[name]
        whole = np.empty(shape, self.manifest.dtypes[name])
        missing = np.ones(shape, bool)
        for piece in pieces:
            axis = piece.axis if piece.axis >= 0 else None
            # Elements of the part, as indices of the whole.
            every = np.arange(whole.size).reshape(shape)
            index = cut(every, axis, slice(piece.low, piece.high), piece.blocks).ravel()
            where = index[piece.start : piece.start + piece.size]
            whole.reshape(-1)[where] = self._read(piece)
            missing.reshape(-1)[where] = False
        if missing.any():
            raise CheckpointError(
                f"{self.folder} has {missing.sum()} elements too few of {section} of {name}"
            )
        return whole

    def _check_header(self, file: str) -> None:
        """Checks the types and shapes in a file's header."""
        path = self.folder / file
        try:
            with safe_open(path, framework="numpy") as arrays:
                for piece in self._in_file[file]:
                    found = arrays.get_slice(piece.key)
                    said = found.get_dtype(), list(found.get_shape())
                    due = _TYPES[self.manifest.dtypes[piece.tensor]], [piece.size]
                    if said != due:
                        raise CheckpointError(f"{path}: {piece.key} is {said}, not {due}")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def _read(self, piece: SavedPiece) -> Array:
        path = self.folder / piece.file
        try:
            with safe_open(path, framework="numpy") as file:
                found: Array = file.get_tensor(piece.key)
        except (OSError, SafetensorError) as error:
            raise Unreadable(f"{path}: {piece.key} cannot be read: {error}") from error
        if found.shape != (piece.size,):
            raise CheckpointError(
                f"{path}: {piece.key} has shape {found.shape}, not ({piece.size},)"
            )
        return found


def newest(
    folder: Path, comm: MPI.Intracomm = MPI.COMM_SELF, before: float = inf
) -> tuple[CheckpointReader | None, list[str]]:
    """Newest whole checkpoint in ``folder``, or None, and why newer ones were refused; collective.

    ``before``: step that it must not have done.
    Every rank compares the digests of its share of the files.  CheckpointError on all ranks: the
    folder cannot be read.
    """

    def names() -> list[str]:
        try:
            return [path.name for step, path in numbered(folder).items() if step < before]
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from error

    refused: list[str] = []
    for name in by_rank_0(comm, names, CheckpointError):
        why = None
        try:
            checkpoint = CheckpointReader(folder / name)
            checkpoint.verify(comm.rank, comm.size)
        except CheckpointError as error:
            why = str(error)
        reasons = [reason for reason in comm.allgather(why) if reason]
        if not reasons:
            return checkpoint, refused
        refused.append(reasons[0])
    return None, refused
