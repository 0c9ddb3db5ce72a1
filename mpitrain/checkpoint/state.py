"""A job's parameters and optimiser state as pieces of tensors, and back."""

from collections.abc import Iterator, Mapping
from itertools import product
from math import isfinite
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from mpitrain.arrays import Array, Shape
from mpitrain.checkpoint import exchange, workers
from mpitrain.checkpoint.changes import differences, origin_of, progress_of
from mpitrain.checkpoint.manifest import (
    EXCHANGE_STATE,
    CheckpointError,
    Manifest,
    Number,
    Progress,
    SavedPiece,
)
from mpitrain.parallel.arena import Tensor
from mpitrain.parallel.store import overlaps
from mpitrain.training.early_stopping import Seen
from mpitrain.update.updater import AVERAGE

if TYPE_CHECKING:
    from mpitrain.checkpoint.reader import CheckpointReader
    from mpitrain.training.parts import Parts
from mpitrain import extras


class _Collected:
    """Arrays of this rank by key, with their pieces, shapes and types."""

    def __init__(self, kind: Number) -> None:
        """``kind``: type of all tensors that are not said to have another."""
        self.arrays: dict[str, Array] = {}
        self.pieces: list[SavedPiece] = []
        self.shapes: dict[str, list[int]] = {}
        self.dtypes: dict[str, Number] = {}
        self._kind = kind

    def elements(self, section: str, tensor: Tensor, start: int, values: Array) -> None:
        """Adds elements of a tensor from ``start`` in the arena on."""
        axis = -1 if tensor.axis is None else tensor.axis
        bounds, kind = tensor.bounds or slice(0, 0), self._kind
        place = axis, bounds.start, bounds.stop, start - tensor.start, values.size, tensor.blocks
        self._add(section, tensor.name, list(tensor.whole), kind, values, *place)

    def whole(self, section: str, name: str, values: Array, kind: Number | None = None) -> None:
        """Adds a whole array that has no place in the arena."""
        shape, flat = list(values.shape), values.reshape(-1)
        self._add(section, name, shape, kind or self._kind, flat, -1, 0, 0, 0, flat.size)

    def _add(
        self, section: str, name: str, shape: list[int], kind: Number, values: Array, *place: int
    ) -> None:
        key = f"{section}.{name}"
        self.arrays[key], self.shapes[name], self.dtypes[name] = values, shape, kind
        self.pieces.append(SavedPiece(name, section, "", key, *place))


def collect(parts: "Parts") -> tuple[dict[str, Array], list[SavedPiece], Manifest]:
    """Arrays, pieces and manifest of this rank; all ranks together write everything once.

    Collective; it changes nothing of the training.
    """
    origin = origin_of(parts)
    shared, own_arrays = workers.state(parts)
    together = workers.together(parts, shared)
    found = _Collected(parts.config.run.dtype)
    for index, piece in enumerate(parts.store.pieces):
        if not parts.grid.owns(piece.group):
            continue
        owned = parts.store.owned(piece)
        for tensor, part in overlaps(parts.arena.tensors, piece, owned):
            for section, flat in _sections(parts, index, own_arrays):
                found.elements(section, tensor, piece.start + part.start, flat[part])
        among = workers.among(owned, parts.grid)
        for tensor, part in overlaps(parts.arena.tensors, piece, among) if together else ():
            start = piece.start + part.start
            for section, flat in together.items():
                found.elements(section, tensor, start, flat[start : piece.start + part.stop])
    for _, own in exchange.kept_parts(parts, written=True):
        found.elements(*own)
    # Replicas have the same; the first one writes it.
    is_first = parts.grid.data.rank == 0
    state = parts.state if is_first and parts.grid.place.tensor == 0 else {}
    for name, values in state.items():
        found.whole("state", name, values)
    for name, values in exchange.state(parts).items() if is_first else ():
        kind: Number = "float32" if values.dtype == np.float32 else "float64"
        found.whole(EXCHANGE_STATE, name, values, kind)
    updates, left_out = parts.updater.counts()
    spikes = parts.spikes.kept if parts.spikes else ([], [], 0)
    manifest = Manifest(
        format=1,
        progress=Progress(
            parts.steps_done,
            updates,
            parts.scale.value,
            parts.scale.good_steps,
            parts.watch.tested,
            dict(parts.watch.seen),
            workers.named(parts, left_out),
            parts.updates_per_step,
            parts.rates.factor,
            parts.measured_rates.values[:] if parts.measured_rates else [],
            parts.epoch,
            parts.seen,
            [*parts.prox] if isfinite(sum(parts.prox)) else [],
            *spikes,
            parts.account.noise.averages if parts.account.noise else [],
            workers.drift(parts),
        ),
        job=msgspec.json.encode(parts.config).decode(),
        layout=parts.layout,
        shapes=found.shapes,
        dtypes=found.dtypes,
        digests={},
        pieces=[],
        data=parts.data_digest,
        state=list(state),
        order=origin.order,
        names=dict(parts.objects.names),
        constants=origin.constants,
        sums=origin.sums,
    )
    return found.arrays, found.pieces, manifest


def restore(
    parts: "Parts", checkpoint: "CheckpointReader", *, allow_changes: bool = False
) -> list[str]:
    """Restores a job from a checkpoint that any layout of the same job wrote.

    Not collective: call :func:`~mpitrain.checkpoint.changes.origin_of` before, and
    ``parts.refresh`` when all ranks have returned.  ``allow_changes``: go on with another job, as
    far as it fits.

    Returns sentences on differences from the run before.  CheckpointError: it is another model's,
    of other numbers, data or order of samples.
    """
    tensors = parts.model.trained().keys() | parts.state.keys()
    now = {own: name for own, name in parts.objects.names.items() if name in tensors}
    checkpoint = checkpoint.renamed(now)
    there = {(one.section.partition("@")[0], one.tensor) for one in checkpoint.manifest.pieces}
    slots = parts.updater.optimizer.slots
    due = "parameters", *slots, *([AVERAGE] if parts.config.optim.average else [])
    pairs = *product(due, parts.model.trained()), *product(["state"], parts.state)
    lacking = [pair for pair in pairs if pair not in there]
    new = [f"{section} of {name}" for section, name in lacking]
    notes = _check_job(parts, checkpoint, new, allow_changes=allow_changes)
    constants = extras.read_constants(checkpoint) if lacking else {}
    were = {own: checkpoint.manifest.names.get(name) for name, own in parts.objects.names.items()}

    def saved(section: str, name: str, shape: Shape) -> Array | None:
        """A tensor's saved values; None: the new ones stay."""
        kind = section.partition("@")[0]
        if kind == AVERAGE and (kind, name) not in there:  # it begins at the parameters
            kind = section = "parameters"
        if (kind, name) in there:
            values = workers.tensor(checkpoint, section, name)
        elif kind in ("parameters", "state") and (was := were.get(name)) in constants:
            values = constants[was].double().numpy()
        else:
            return None
        if values.shape != shape:
            raise CheckpointError(
                f"{checkpoint.folder}: {name} has shape {values.shape}, the model's is {shape}; "
                "set the model as it was, or train another one in another run.dir"
            )
        return values

    as_they_were = workers.are_those_of(parts, checkpoint)
    as_they_were &= not (lacking and parts.config.sync.drifts)
    # Workers that begin together take the common arrays; their anchor is where they begin.
    kept, own_arrays = workers.state(parts)
    if parts.strategy and not as_they_were:
        kept = parts.strategy.shared
    taken: set[str] = set()
    for index, piece in enumerate(parts.store.pieces):
        found = list(_sections(parts, index, own_arrays) if as_they_were else _alike(parts, index))
        own = slice(piece.start, piece.stop)
        found += [(name, flat[own]) for name, flat in kept.items()]
        taken |= {section for section, _ in found}
        for tensor, part in overlaps(parts.arena.tensors, piece):
            start = piece.start + part.start - tensor.start
            for section, flat in found:
                values = saved(section, tensor.name, tensor.whole)
                if values is not None:
                    own_part = tensor.part(values).ravel()[start : start + part.stop - part.start]
                    flat[part] = parts.device.put(own_part)
    if parts.strategy:
        parts.strategy.begin(checkpoint.manifest.progress.step if as_they_were else None)
    if not as_they_were:
        notes += workers.begun_anew(parts, checkpoint, taken)
    for name, values in parts.state.items():
        whole = saved("state", name, values.shape)
        if whole is not None:
            values[...] = parts.device.put(whole)
    if anew := exchange.restore(parts, checkpoint):
        notes.append(f"{', '.join(anew[:3])} of the exchanges begin anew in this layout")
    progress, anew = progress_of(parts, checkpoint)
    notes += anew
    left_out = workers.left_out(parts, checkpoint, as_they_were)
    for _, name in lacking:  # a tensor whose state begins now counts its updates from now on
        if not any((slot, name) in there for slot in slots or due):
            left_out[name] = progress.updates
    parts.updater.resume(progress.updates, left_out)
    parts.updates_per_step = max(parts.updates_per_step, progress.per_step)
    parts.watch.tested = progress.tested
    parts.rates.factor = progress.rate_factor
    parts.prox = progress.prox or parts.prox
    if parts.spikes:
        parts.spikes.take(progress.losses, progress.skipped, progress.times_back)
    if parts.account.noise and progress.noise:
        parts.account.noise.averages = progress.noise
    parts.account.drift = progress.drift if as_they_were else 0.0
    parts.watch.seen = {text: progress.seen.get(text, Seen()) for text in parts.watch.seen}
    if parts.measured_rates:
        parts.measured_rates.values = progress.measured
    if parts.scale.enabled:
        parts.scale.value = progress.loss_scale
        parts.scale.good_steps = progress.good_steps
    return notes + _go_on(parts, checkpoint)


def _go_on(parts: "Parts", checkpoint: "CheckpointReader") -> list[str]:
    """Goes on behind the samples that were seen; gives a sentence on those that come again.

    DataError: the program's own sampler fails.
    """
    progress, sampler, notes = checkpoint.manifest.progress, parts.sampler, list[str]()
    parts.steps_done, epoch, seen = progress.step, progress.epoch, progress.samples
    if seen and origin_of(parts).order not in ("", checkpoint.manifest.order):
        notes = [f"the samples have another order, so that {seen} of epoch {epoch} come again"]
        seen, parts.watch.tested = 0, progress.step  # no test is missing here
    left = sum(1 for _ in sampler.batches(epoch, seen))
    parts.rates.ahead = progress.step + left - (epoch + 1) * sampler.steps_per_epoch
    parts.epoch, parts.seen = (epoch, seen) if left else (epoch + 1, 0)
    return notes


def _sections(parts: "Parts", index: int, own: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
    """Arrays in the place of a piece by section; workers that drift have sections of their own.

    ``own``: arrays of this worker alone.
    """
    if not parts.strategy:
        yield from _alike(parts, index)
        return
    piece, replica = parts.store.pieces[index], parts.grid.place.replica
    for name, flat in _alike(parts, index):
        yield workers.section(name, replica), flat
    for name, flat in own.items():
        yield workers.section(name, replica), flat[piece.start : piece.stop]


def _alike(parts: "Parts", index: int) -> Iterator[tuple[str, Array]]:
    """Arrays in the place of a piece by section, where workers do not differ."""
    yield "parameters", parts.store.pieces[index].parameters
    yield from parts.updater.state[index].items()


def _check_job(
    parts: "Parts", checkpoint: "CheckpointReader", new: list[str], *, allow_changes: bool
) -> list[str]:
    """Refuses another job unless changes are allowed, and lost values in any case; gives notes.

    ``new``: arrays that the checkpoint lacks.
    """
    then_trained = set(checkpoint.names) - set(checkpoint.manifest.state)
    if gone := sorted(then_trained - parts.model.trained().keys()):
        raise CheckpointError(
            f"{checkpoint.folder} has values of {', '.join(gone[:3])}, which the model does not "
            "train: what was trained once cannot be frozen or left out in a run that goes on"
        )
    notes: list[str] = []
    if found := list(differences(parts, checkpoint)) or [f"it had no {one}" for one in new]:
        more = f", and {len(found) - 1} more" if found[1:] else ""
        if not allow_changes:
            raise CheckpointError(
                f"{checkpoint.folder} is of another job: {found[0]}{more}; set it as it was, train "
                "in another run.dir or without --resume, or go on all the same with "
                "--allow-changes, in a program fit(resume=True, allow_changes=True)"
            )
        notes.append(f"goes on with another job: {'; '.join(found)}")
    sums = origin_of(parts).sums
    if (were := checkpoint.manifest.sums) not in ("", sums):
        notes.append(f"sums were by {were}, and are by {sums}: their last digits may differ")
    if new:
        notes.append(
            f"{len(new)} arrays begin anew, as {', '.join(new[:3])}: parameters as they were while "
            "constant, or as the model has them, and the optimiser's state as at its first step"
        )
    return notes
