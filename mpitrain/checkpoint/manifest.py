"""Manifest of a checkpoint: the place of each part of a tensor, and the progress of training.

A checkpoint is a folder ``step-00001200``, or ``best-00001200`` for the best test, with one
safetensors file a rank and ``manifest.json``.  It is written under another name and renamed when
all of it is on disk, so that a folder of that name is whole.  Reading it runs no code from it.
"""

import hashlib
import re
from collections import Counter
from math import prod
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from collectives.files import check_regular
from mpitrain.config import Config
from mpitrain.config.numbers import NonNegative, Positive
from mpitrain.training.early_stopping import Seen

MANIFEST = "manifest.json"
#: Beginning of the sections of exchanges.
EXCHANGE = "exchange."
#: Section of exchanges' arrays that are no elements of parameters.
EXCHANGE_STATE = "exchange.state"
#: Allowed names of files, which cannot leave their folder.
_FILE = re.compile(r"rank-\d{5}\.safetensors")
_CONSTANTS = re.compile(r"constants-[0-9a-f]{32}\.safetensors")
_LARGEST_MANIFEST = 1 << 30
_MOST_AXES = 32

Number = Literal["float32", "float64"]
Steps = Annotated[int, Meta(ge=0, le=2**53)]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message names the file."""


class Unreadable(CheckpointError):
    """A file of a checkpoint, which was whole when it was verified, cannot be read."""


class SavedPiece(Struct, frozen=True, forbid_unknown_fields=True):
    """A run of elements of one tensor.

    Attributes:
        tensor: its name in the model.
        section: ``parameters``, a slot of the optimiser, ``average``, or one of exchanges.
        file, key: place of the elements.
        axis, low, high, blocks: the rank had ``low <= i < high`` in each of ``blocks`` equal runs
            along ``axis`` of the tensor; axis -1 for the whole tensor.
        start: the first element within that part, counted in C order.
        size: number of elements.
    """

    tensor: str
    section: str
    file: str
    key: str
    axis: int
    low: int
    high: int
    start: int
    size: int
    blocks: int = 1


class Progress(Struct, frozen=True, forbid_unknown_fields=True):
    """How far training was.

    Attributes:
        step: steps that were done, skipped ones included.
        updates: updates of the parameters: steps that changed them, or pushes to a server.
        loss_scale, good_steps: state of the loss scale in 16-bit training.
        tested: steps before the last test.
        seen: best test so far for each value that the job watches.
        left_out: number of updates without a tensor, by its name, less those before the run and
            those beyond one in a step.
        per_step: most updates in a step; more than one where workers push to servers.
        rate_factor: factor on all rates that the program has set.
        measured: values of the tests that rates follow, in turn; None: not finite.
        epoch, samples: epoch of the next step, and how many of its samples were seen.
        prox: as :class:`~mpitrain.training.parts.Parts` has it.
        losses, skipped, times_back: see :attr:`mpitrain.training.spikes.Spikes.kept`.
        noise: see :class:`mpitrain.training.noise.NoiseScale`.
        drift: workers' drift at the last exchange.
    """

    step: Steps
    updates: Steps
    loss_scale: Positive = 1.0
    good_steps: Steps = 0
    tested: Steps = 0
    seen: dict[str, Seen] = {}
    left_out: dict[str, Annotated[int, Meta(ge=-(2**53), le=2**53)]] = {}
    per_step: Annotated[int, Meta(ge=1, le=2**31)] = 1
    rate_factor: NonNegative = 1.0
    measured: list[float | None] = []
    epoch: Steps = 0
    samples: Steps = 0
    prox: list[float] = []
    losses: list[float] = []
    skipped: list[Steps] = []
    times_back: Steps = 0
    noise: list[float] = []
    drift: NonNegative = 0.0

    def __post_init__(self) -> None:
        if self.updates > self.step * self.per_step:
            raise ValueError(f"{self.updates} updates in {self.step} steps")


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """The manifest of a checkpoint.

    Attributes:
        format: number of this file's format.
        progress: how far training was.
        job: the configuration, as JSON.
        layout: layout of the ranks that wrote it, for people.
        shapes: whole shape of each tensor.
        dtypes: type of each tensor.
        digests: SHA-256 of each file, hexadecimal.
        pieces: places of all elements.
        data: digest of the training data.
        state: tensors of the section ``state``, which are no parameters, as the running mean of a
            batch norm.
        order: order of the samples, as text.
        names: for each entry of a torch module's ``state_dict``, the name of the tensor here, or
            of the constant in its file.
        constants: name of the file of constants, which checkpoints of a run share; empty: none.
        sums: MPI library and tuning table, on which the last digits of sums depend.
    """

    format: int
    progress: Progress
    job: str
    layout: str
    shapes: dict[str, list[int]]
    dtypes: dict[str, Number]
    digests: dict[str, str]
    pieces: list[SavedPiece]
    data: str = ""
    state: list[str] = []
    order: str = ""
    names: dict[str, str] = {}
    constants: str = ""
    sums: str = ""


def encode(manifest: Manifest) -> bytes:
    """Bytes of the file; ``CheckpointError`` if reading them would not give the manifest again."""
    data = msgspec.json.encode(manifest)
    if parse(data, "what would be written") != manifest:
        raise CheckpointError("the manifest would be read as another one")
    return data


def parse(data: bytes, name: str) -> Manifest:
    """Reads a manifest from the bytes of its file; CheckpointError says why it is none."""
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
        job_of(manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        reason = " ".join(str(error).split())  # it may quote what is in the file
        raise CheckpointError(f"{name} is not a manifest: {reason}") from error
    if manifest.format != 1:
        raise CheckpointError(f"{name} has format {manifest.format}; this program reads format 1")
    for tensor, shape in manifest.shapes.items():
        if len(shape) > _MOST_AXES or any(length < 0 for length in shape):
            raise CheckpointError(
                f"{name}: the shape of {tensor!r} has a length below 0 or more than "
                f"{_MOST_AXES} axes"
            )
    for piece in manifest.pieces:
        _check(piece, manifest, name)
    _check_whole(manifest, name)
    for file in manifest.digests:
        if not _FILE.fullmatch(file):
            raise CheckpointError(f"{name} names {file!r}, which is no file of a checkpoint")
    if manifest.constants and not _CONSTANTS.fullmatch(manifest.constants):
        raise CheckpointError(f"{name} names {manifest.constants!r}, which is no file of constants")
    return manifest


def job_of(manifest: Manifest) -> Config:
    """Job that wrote a checkpoint."""
    return msgspec.json.decode(manifest.job, type=Config)


def read(folder: Path) -> Manifest:
    """Manifest of a checkpoint; ``CheckpointError`` if it cannot be read."""
    path = folder / MANIFEST
    try:
        check_regular(path)
        if path.stat().st_size > _LARGEST_MANIFEST:
            raise CheckpointError(f"{path} has more than {_LARGEST_MANIFEST} bytes")
        return parse(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def digest(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    check_regular(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check(piece: SavedPiece, manifest: Manifest, name: str) -> None:
    shape = manifest.shapes.get(piece.tensor)
    what = f"{name}: a piece of {piece.tensor!r}"
    if shape is None or piece.tensor not in manifest.dtypes:
        raise CheckpointError(f"{what} has no shape or no type")
    if piece.file not in manifest.digests:
        raise CheckpointError(f"{what} is in {piece.file!r}, which has no digest")
    part = list(shape)
    if piece.axis != -1:
        if (
            not 0 <= piece.axis < len(shape)
            or piece.blocks < 1
            or shape[piece.axis] % piece.blocks
            or not 0 <= piece.low <= piece.high <= shape[piece.axis] // piece.blocks
        ):
            raise CheckpointError(f"{what} lies outside of its shape {shape}")
        part[piece.axis] = piece.blocks * (piece.high - piece.low)
    if piece.start < 0 or piece.size < 0 or piece.start + piece.size > prod(part):
        raise CheckpointError(f"{what} lies outside of its shape {shape}")


def _check_whole(manifest: Manifest, name: str) -> None:
    """Checks that sections have all elements of their tensors, or none in those of exchanges."""
    if len({(piece.file, piece.key) for piece in manifest.pieces}) < len(manifest.pieces):
        raise CheckpointError(f"{name} has two pieces in one place of a file")
    found: Counter[tuple[str, str]] = Counter()
    for piece in manifest.pieces:
        found[piece.section, piece.tensor] += piece.size
    state = set(manifest.state)
    if not state <= manifest.shapes.keys():
        raise CheckpointError(f"{name} has no shape of {min(state - manifest.shapes.keys())!r}")
    due = {"parameters", "state"} if state else {"parameters"}
    nobodys = {tensor for section, tensor in found if section == EXCHANGE_STATE}
    for section in due | {section for section, _ in found}:
        for tensor, shape in manifest.shapes.items():
            missing = prod(shape) - found[section, tensor]
            if section.startswith(EXCHANGE):
                is_due = found[section, tensor] > 0
            else:
                is_due = (tensor in state) == (section == "state") and tensor not in nobodys
            if missing > 0 and is_due:
                raise CheckpointError(
                    f"{name} has {missing} elements too few of {section} of {tensor!r}"
                )
