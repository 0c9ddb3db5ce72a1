"""What a checkpoint says of itself: which file has which part of which tensor, and how far it is.

A checkpoint is a folder ``step-00001200``, or ``best-00001200`` if it is of the best test, of one
safetensors file a rank and ``manifest.json``.  It is written under another name and renamed when
everything in it is on disk, so that a folder of that name is whole.  Reading it runs nothing that
is in it.
"""

import hashlib
import re
from collections import Counter
from math import prod
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from mpitrain.checkpoint.recipe import Recipe
from mpitrain.config import Config
from mpitrain.config.numbers import Positive
from mpitrain.files import check_regular
from mpitrain.training.watch import Seen

MANIFEST = "manifest.json"
#: Sections of what exchanges keep begin with it.
EXCHANGE = "exchange."
#: Of these, what has no place among the elements of the parameters.
EXCHANGE_STATE = "exchange.state"
#: Nothing but such names may stand in a manifest: they cannot leave their folder.
_FILE = re.compile(r"rank-\d{5}\.safetensors")
_CONSTANTS = re.compile(r"constants-[0-9a-f]{32}\.safetensors")
_LARGEST_MANIFEST = 1 << 30
_MOST_AXES = 32

Number = Literal["float32", "float64"]
Steps = Annotated[int, Meta(ge=0, le=2**53)]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message names the file."""


class SavedPiece(Struct, frozen=True, forbid_unknown_fields=True):
    """A run of elements of one tensor.

    Attributes:
        tensor: its name in the model.
        section: ``parameters``, a slot of the optimiser, ``average``, or what exchanges keep.
        file, key: where it is.
        axis, low, high: the rank had ``low <= i < high`` along ``axis`` of the tensor; axis -1 for
            all of it.
        start: the first element within that part, counted in C order.
        size: elements.
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


class Progress(Struct, frozen=True, forbid_unknown_fields=True):
    """How far training was.

    Attributes:
        step: steps that were done, those that were skipped included.
        updates: of the parameters: steps that changed them, or pushes to a server.
        loss_scale, good_steps: state of the loss scale in 16-bit training.
        tested: steps before the last test.
        seen: the best test so far, by each value that the job watches.
        left_out: of the updates, those that a tensor had no part in, by its name.
        per_step: updates in a step, at most; more than one where workers push to servers.
    """

    step: Steps
    updates: Steps
    loss_scale: Positive = 1.0
    good_steps: Steps = 0
    tested: Steps = 0
    seen: dict[str, Seen] = {}
    left_out: dict[str, Steps] = {}
    per_step: Annotated[int, Meta(ge=1, le=2**31)] = 1

    def __post_init__(self) -> None:
        if self.updates > self.step * self.per_step:
            raise ValueError(f"{self.updates} updates in {self.step} steps")


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """The manifest of a checkpoint.

    Attributes:
        format: number of this file's format.
        progress: how far training was.
        job: the configuration, as JSON.
        layout: layout of the ranks that wrote it, for people to read.
        shapes: whole shape of each tensor.
        dtypes: type of each tensor.
        digests: SHA-256 of each file, hexadecimal.
        pieces: where everything is.
        data: digest of the data it was trained on; empty in manifests of an earlier version.
        state: names of the tensors that are in the section ``state`` alone: no parameters, as the
            running mean of a batch norm.
        recipe: what else decided on the numbers; None in manifests of an earlier version.
        names: of a torch module, for each entry of its ``state_dict`` the tensor's name here, or
            the constant's in the file of those.
        constants: name of that file, which all checkpoints of a run have one of; empty: none.
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
    recipe: Recipe | None = None
    names: dict[str, str] = {}
    constants: str = ""


def encode(manifest: Manifest) -> bytes:
    """The bytes of its file, which :func:`parse` gives the same manifest for.

    Raises:
        CheckpointError: it would not, so that nobody could go on from the checkpoint.
    """
    data = msgspec.json.encode(manifest)
    if parse(data, "what would be written") != manifest:
        raise CheckpointError("what would be written is not what would be read again")
    return data


def parse(data: bytes, name: str) -> Manifest:
    """A manifest from the bytes of its file.

    Raises:
        CheckpointError: it is not one, names files outside of its folder, or says what cannot be
            of steps, types, shapes or the job.
    """
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
    """The job that a checkpoint is of."""
    return msgspec.json.decode(manifest.job, type=Config)


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint; ``CheckpointError`` if it has none that can be read."""
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
            or not 0 <= piece.low <= piece.high <= shape[piece.axis]
        ):
            raise CheckpointError(f"{what} lies outside of its shape {shape}")
        part[piece.axis] = piece.high - piece.low
    if piece.start < 0 or piece.size < 0 or piece.start + piece.size > prod(part):
        raise CheckpointError(f"{what} lies outside of its shape {shape}")


def _check_whole(manifest: Manifest, name: str) -> None:
    """Each section that there is, and the parameters, have all elements of their tensors; what
    exchanges keep may be of some tensors alone, or of nobody's."""
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
