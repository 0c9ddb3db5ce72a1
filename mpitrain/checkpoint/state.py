"""A job's parameters and optimiser state as pieces of tensors, and back."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import asdict, replace

from mpitrain.arrays import Array
from mpitrain.checkpoint import exchange, workers
from mpitrain.checkpoint.manifest import (
    EXCHANGE_STATE,
    CheckpointError,
    Manifest,
    Number,
    Progress,
    SavedPiece,
)
from mpitrain.checkpoint.reader import CheckpointReader
from mpitrain.checkpoint.recipe import name_of_constants, settled_recipe_of
from mpitrain.config import Config, Own
from mpitrain.parallel.arena import Tensor
from mpitrain.parallel.store import overlaps
from mpitrain.step.update import AVERAGE

if TYPE_CHECKING:
    from mpitrain.training.parts import Parts


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
    recipe = settled_recipe_of(parts)
    together = workers.together(parts)
    found = _Collected(parts.config.run.dtype)
    for index, piece in enumerate(parts.store.pieces):
        if not parts.grid.counts(piece.group):
            continue
        counted = parts.store.counted(piece)
        for tensor, part in overlaps(parts.arena.tensors, piece, counted):
            for section, flat in _sections(parts, index):
                found.elements(section, tensor, piece.start + part.start, flat[part])
        among = workers.among(counted, parts.grid)
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
            parts.feed.place(),
        ),
        job=msgspec.json.encode(parts.config).decode(),
        layout=parts.layout,
        shapes=found.shapes,
        dtypes=found.dtypes,
        digests={},
        pieces=[],
        data=parts.data_digest,
        state=list(state),
        recipe=recipe,
        names=dict(parts.objects.names),
        constants=name_of_constants(recipe, parts.objects.names),
    )
    return found.arrays, found.pieces, manifest


def restore(
    parts: "Parts", checkpoint: CheckpointReader, *, allow_changes: bool = False
) -> list[str]:
    """Restores a job from a checkpoint that any layout of the same job wrote.

    Not collective: call :func:`~mpitrain.checkpoint.recipe.recipe_of` before, and ``parts.refresh``
    when all ranks have returned.  ``allow_changes``: go on with another job, as far as it fits.

    Returns sentences on differences from the run before.  CheckpointError: it is another model's,
    of other numbers, data or order of samples.
    """
    notes = _check_job(parts, checkpoint, allow_changes=allow_changes)
    as_they_were = workers.are_those_of(parts, checkpoint)
    # Workers that begin together take the common arrays; their anchor is where they begin.
    kept = workers.shared(parts) if as_they_were else dict(parts.strategy.shared())
    kept = {
        name: flat for name, flat in kept.items() if as_they_were or name in checkpoint.sections
    }
    taken: set[str] = set()
    for index, piece in enumerate(parts.store.pieces):
        found = list(_sections(parts, index) if as_they_were else _alike(parts, index))
        own = slice(piece.start, piece.stop)
        found += [(name, flat[own]) for name, flat in kept.items()]
        taken |= {section for section, _ in found}
        for tensor, part in overlaps(parts.arena.tensors, piece):
            start = piece.start + part.start - tensor.start
            for section, flat in found:
                values = workers.tensor(checkpoint, section, tensor.name)
                if values.shape != tensor.whole:
                    raise CheckpointError(
                        f"{checkpoint.folder}: {tensor.name} has shape {values.shape}, and the "
                        f"model's is {tensor.whole}"
                    )
                own_part = tensor.part(values).ravel()
                flat[part] = parts.device.put(own_part[start : start + part.stop - part.start])
    if as_they_were:
        parts.strategy.resumed(checkpoint.manifest.progress.step)
    else:
        parts.strategy.begin()
        notes += workers.begun_anew(parts, checkpoint, taken)
    for name, values in parts.state.items():
        whole = checkpoint.tensor("state", name)
        if whole.shape != values.shape:
            raise CheckpointError(
                f"{checkpoint.folder}: {name} has shape {whole.shape}, and the model's is "
                f"{values.shape}"
            )
        values[...] = parts.device.put(whole)
    if anew := exchange.restore(parts, checkpoint):
        notes.append(f"{', '.join(anew[:3])} of the exchanges begin anew in this layout")
    progress = checkpoint.manifest.progress
    parts.steps_done = progress.step
    parts.updater.resume(progress.updates, workers.left_out(parts, checkpoint, as_they_were))
    parts.updates_per_step = max(parts.updates_per_step, progress.per_step)
    parts.watch.tested = progress.tested
    parts.rates.factor = progress.rate_factor
    parts.feed.go_on(progress.place)
    for text in parts.watch.seen.keys() & progress.seen.keys():
        parts.watch.seen[text] = progress.seen[text]
    if parts.scale.enabled:
        parts.scale.value = progress.loss_scale
        parts.scale.good_steps = progress.good_steps
    return notes


def _sections(parts: "Parts", index: int) -> Iterator[tuple[str, Array]]:
    """Arrays in the place of a piece by section; workers that drift have sections of their own."""
    if not parts.config.sync.drifts:
        yield from _alike(parts, index)
        return
    piece, replica = parts.store.pieces[index], parts.grid.place.replica
    for name, flat in _alike(parts, index):
        yield workers.section(name, replica), flat
    for name, flat in parts.strategy.own().items():
        yield workers.section(name, replica), flat[piece.start : piece.stop]


def _alike(parts: "Parts", index: int) -> Iterator[tuple[str, Array]]:
    """Arrays in the place of a piece by section, where workers do not differ."""
    yield "parameters", parts.store.pieces[index].parameters
    yield from parts.updater.state[index].items()


def _names(own: Own) -> dict[str, object]:
    """Names of a job's own objects, without their files, and what may change: the schedule, and
    the layout's splits and cuts, of which the parameters' names say what matters."""
    return {
        key: value.rpartition(":")[2] if isinstance(value, str) else value
        for key, value in asdict(own).items()
        if key not in ("schedule", "splits", "experts", "cuts")
    }


def _local_epochs(then: Config, now: Config) -> tuple[int, int]:
    """Epochs of each client then and now; without clients, they only say when to end."""
    return (then.train.epochs, now.train.epochs) if now.federated.clients else (0, 0)


def _difference(place: str, before: object, after: object) -> tuple[str, object, object]:
    """The first key that differs, if the values are tables."""
    if isinstance(before, msgspec.Struct) and isinstance(after, msgspec.Struct):
        before, after = asdict(before), asdict(after)
    if isinstance(before, dict) and isinstance(after, dict):
        key = next(key for key in before if before[key] != after[key])
        place, before, after = f"{place}.{key}", before[key], after[key]
    return place, before, after


def _differences(parts: "Parts", checkpoint: CheckpointReader) -> Iterator[str]:
    """Differences that make it another training; the layout of the ranks is none."""
    then, now = checkpoint.job, parts.config
    # The digest compares the data, wherever they lie.
    data = replace(then.data, workers=now.data.workers, path=now.data.path)
    found = [
        _difference(place, before, after)
        for place, before, after in (
            ("model", then.model, now.model),
            ("data", data, now.data),
            ("own", _names(then.own), _names(now.own)),
            ("loss", then.loss, now.loss),
            ("compress", then.compress, now.compress),
            ("optim.name", then.optim.name, now.optim.name),
            ("run.seed", then.run.seed, now.run.seed),
            ("run.random", then.run.random, now.run.random),
            ("run.dtype", then.run.dtype, now.run.dtype),
            ("run.compute", then.run.compute, now.run.compute),
            ("train.batch_size", then.train.batch_size, now.train.batch_size),
            ("federated", then.federated, replace(now.federated, rounds=then.federated.rounds)),
            ("train.epochs", *_local_epochs(then, now)),
        )
        if before != after
    ]
    found += checkpoint.manifest.recipe.differences(parts.recipe)
    for place, before, after in found:
        yield f"{place} was {before}, and is {after}"
    if checkpoint.manifest.data != parts.data_digest:
        yield f"it had other data: what data.path = {now.data.path!r} holds has changed since"


def _check_job(parts: "Parts", checkpoint: CheckpointReader, *, allow_changes: bool) -> list[str]:
    """Refuses another job unless changes are allowed, and lost values in any case; gives notes."""
    then_trained = set(checkpoint.names) - set(checkpoint.manifest.state)
    if gone := sorted(then_trained - parts.model.trained().keys()):
        then, now = checkpoint.job.own.cuts, parts.config.own.cuts
        if then != now:
            raise CheckpointError(
                f"{checkpoint.folder} has other names of parameters, as own.cuts was {then!r}, and "
                f"is {now!r}; give cuts= as it was: it may stand without parallel.pipe"
            )
        raise CheckpointError(
            f"{checkpoint.folder} has values of {', '.join(gone[:3])}, which the model does not "
            "train: what was trained once cannot be frozen or left out in a run that goes on"
        )
    notes: list[str] = []
    if found := list(_differences(parts, checkpoint)):
        more = f", and {len(found) - 1} more" if found[1:] else ""
        if not allow_changes:
            raise CheckpointError(
                f"{checkpoint.folder} is of another job: {found[0]}{more}; set it as it was, train "
                "in another run.dir or without --resume, or go on all the same with "
                "--allow-changes, in a program fit(resume=True, allow_changes=True)"
            )
        notes.append(f"goes on with another job: {found[0]}{more}")
    recipe = checkpoint.manifest.recipe
    if recipe.code and recipe.bytecode != parts.recipe.bytecode:
        notes.append("another Python has written the checkpoint, so that code was not compared")
    if parts.config.optim.average and AVERAGE not in checkpoint.sections:
        raise CheckpointError(
            f"{checkpoint.folder} has no averages, as optim.average was 0; leave it at 0, or train "
            "in another run.dir or without --resume"
        )
    return notes
