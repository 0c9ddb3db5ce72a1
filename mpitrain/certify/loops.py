"""A loop of the trainer that says what its steps compute."""

from collections.abc import Callable, Sequence
from functools import cache, wraps
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mpitrain.arrays import Array
from mpitrain.certify.record import HERE, Abstained, Enough, Recorded, Session
from mpitrain.checkpoint.changes import origin_of
from mpitrain.checkpoint.saving import FOLDER, resume, save
from mpitrain.checkpoint.writer import Writer
from mpitrain.config import Config
from mpitrain.metrics import records
from mpitrain.parallel.store import Piece
from mpitrain.training.batches import part
from mpitrain.training.loop import Batch, Loop, read_batches
from mpitrain.update.agreement import Agreed, StepReport


@cache
def install(module: ModuleType) -> None:
    """Let the jobs and loops that a module makes be those of the session of their thread."""
    own: Any = module
    normalise, start = own.normalise, own.start

    @wraps(normalise)
    def settled(comm: Any, config: Any, given: Any, settings: Any) -> Any:
        if session := HERE.session:
            session.record.is_ours, tables = True, session.tables
            own = {key: {**settings.get(key, {}), **keys} for key, keys in tables.items()}
            # Behind single keys of these tables, so that they win.
            settings = {key: one for key, one in settings.items() if key not in own} | own
        return normalise(comm, config, given, settings)

    @wraps(start)
    def watched(*given: Any, **named: Any) -> Loop:
        loop: Loop = start(*given, **named)
        if session := HERE.session:
            session.opened.append(loop.close)
            _LoopWatch(session, loop)
        return loop

    own.normalise, own.start = settled, watched


def _other_numbers(job: Config) -> str:
    """Why a job has other numbers than one process by intention; empty: it has not."""
    usual = Config()
    for table in ("compress", "sync", "server", "federated"):
        if getattr(job, table) != getattr(usual, table):
            return f"[{table}] trains otherwise than one process"
    if job.parallel.schedule == "asynchronous":
        return "an asynchronous pipeline trains with older weights than one process"
    return "run.random = 'local' draws other numbers on each rank" * (job.run.random == "local")


class _LoopWatch:
    """Records the steps of a loop; all methods are collective."""

    def __init__(self, session: Session, loop: Loop) -> None:
        """Begin with the loop's parameters, or those of its checkpoint.

        Raises:
            Abstained: one process has other numbers.
        """
        self._session, self._parts, parts = session, loop.parts, loop.parts
        if why := _other_numbers(parts.config):
            raise Abstained(why)
        self._step, self._agree = loop.step, parts.gradient.agree
        self._names = {own: name for name, own in parts.objects.names.items()}
        self._gradients = dict[str, Array]()
        origin_of(parts)
        if session.goes_on:
            resume(parts)
        kind = str(np.dtype(parts.passes.dtype))
        session.record.eps = 2.0**-7 if kind == "bfloat16" else float(np.finfo(kind).eps)
        session.record.has_means = bool(parts.state)
        self._first = [piece.parameters.copy() for piece in parts.store.pieces]
        for piece in parts.store.pieces:
            session.move(piece.parameters)
        parts.refresh()
        session.record.initial = self._whole(lambda piece: piece.parameters) | self._state()
        loop.step, parts.gradient.agree = self.step, self.agree  # type: ignore[method-assign]

    def step(self, batch: Batch) -> Sequence[records.Record]:
        """A step of the loop; raises Enough after the last one."""
        parts, session = self._parts, self._session
        if session.mutation == "repeat":
            indices = batch.indices[0].copy()
            indices[-1] = indices[0]
            (batch,) = read_batches(parts, batch.epoch, iter([indices]))
        samples = self._samples(batch)
        found = self._step(batch)
        (loss,) = [one.loss for one in found if isinstance(one, records.Step)] or [np.nan]
        parameters = self._whole(lambda piece: piece.parameters) | self._state()
        session.record.steps.append(Recorded(samples, loss, self._gradients, parameters))
        if session.mutation == "stale":
            for piece, values in zip(parts.store.pieces, self._first, strict=True):
                piece.parameters[...] = values
            parts.refresh()
        if parts.steps_done == session.save_at:
            writer = Writer(parts.comm, Path(session.save_to, FOLDER), keep=1, background=False)
            writer.prepare()
            save(parts, writer)
            writer.finish()
        if parts.steps_done >= session.last:
            raise Enough
        return found

    def agree(self, own: StepReport, **how: Any) -> Agreed:
        """Agree on a step, and note its gradients."""
        parts, mutation = self._parts, self._session.mutation
        for piece in parts.store.pieces:
            if mutation == "scale":
                piece.gradients[...] *= parts.comm.size + 1
            elif mutation == "drop":
                piece.gradients[: max(0, parts.store.buckets[0].stop - piece.start)] = 0
        agreed = self._agree(own, **how)
        factor = agreed.mean_factor / parts.scale.value
        self._gradients = self._whole(lambda piece: piece.gradients * factor)
        return agreed

    def _samples(self, batch: Batch) -> list[int]:
        """Numbers of the samples that the ranks of the first stage take."""
        parts, place, count = self._parts, self._parts.grid.place, self._parts.passes.micro_batches
        is_first = not (place.stage or place.tensor or place.context)
        held = (batch.held or ()) if is_first else ()
        own = [part(batch.indices, count, number).tolist() for number in held]
        return sorted(chain.from_iterable(chain.from_iterable(parts.comm.allgather(own))))

    def _state(self) -> dict[str, Array]:
        """Running values, on rank 0; those of a stage's replicas are alike."""
        parts = self._parts
        own = {name: np.array(parts.device.get(one)) for name, one in parts.state.items()}
        return dict(chain.from_iterable(one.items() for one in parts.comm.gather(own) or ()))

    def _whole(self, of: Callable[[Piece], Array]) -> dict[str, Array]:
        """Whole tensors by their names in the program, on rank 0."""
        parts = self._parts
        found = parts.whole(lambda number: of(parts.store.pieces[number]))
        return {self._names.get(name, name): array for name, array in found.items()}
