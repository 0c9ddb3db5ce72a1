"""Comparison of the first steps with plain torch."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from mpitrain.adapters.torch.checks.probe import MISFITS, one_line
from mpitrain.adapters.torch.shadow.differences import Difference, first, first_parameter
from mpitrain.adapters.torch.shadow.sides import Keyed, Ours, Plain
from mpitrain.arrays import Array
from mpitrain.config import ConfigError
from mpitrain.data import Samples
from mpitrain.data.generators import kept_generators, random_states
from mpitrain.nn.context import Context
from mpitrain.training.batches import part
from mpitrain.training.loop import Batch
from mpitrain.training.parts import Parts

log = logging.getLogger("mpitrain")

#: Samples that are taken; parameters, gradients and states of all copies, in sizes of the module.
_FEW, _COPIES = 4, 12


class Shadow:
    """Compares what the trainer's layers train with what plain torch trains.

    In each of the first ``run.shadow`` steps, a few samples of the batch go through the module as
    in a loop of torch, and through copies of the trainer's layers as two micro-batches.  Both have
    the same parameters, so that rounding does not add up, and their optimisers get the same
    gradients.  How much rounding matters says another loop, whose parameters and inputs are moved
    by one ulp.  All begin before the first step, when it is known what the layers change and what
    the loss reads.  The module has its own tensors and attributes again after each look, and
    nothing of it is part of the run.
    """

    _ours: Ours
    _plain: Plain
    _twin: Plain

    def __init__(
        self, module: torch.nn.Module, layers: Mapping[str, Any], factory: Any, schedule: Any
    ) -> None:
        """Copy nothing yet; the program's ``factory`` makes the optimiser of its ``module``."""
        self._module, self._layers = module, layers
        self._factory, self._schedule = factory, schedule
        self._looks, self._seconds, self._is_off = 0, 0.0, False

    def _begin(self, loss: Any, dtype: str) -> None:
        """Make the sides that are compared."""
        module, layers = self._module, self._layers
        size = sum(p.numel() for p in module.parameters()) * np.dtype(dtype).itemsize
        if _COPIES * size > _available() / 2:
            raise MemoryError(f"copies of the module would take {_COPIES * size >> 20} MiB")
        self._ours = Ours(module, layers, loss, dtype)
        self._plain, self._twin = (Plain(module, layers, dtype) for _ in range(2))
        with self._plain.there():
            self._plain.optimise(self._factory, self._schedule)

    def _stop(self, why: object) -> None:
        self._is_off = True
        log.warning("run.shadow is off, as it cannot compare with plain torch: %s", one_line(why))

    def __call__(self, parts: Parts, batch: Batch) -> None:
        """Compare a step that is to come; ConfigError: the trainer would train something else."""
        self._looks += 1
        if parts.steps_done + 1 != self._looks or self._is_off or not batch.held:
            return
        begun = perf_counter()
        with kept_generators():
            try:
                if self._looks == 1:
                    self._begin(parts.model.loss, parts.config.run.dtype)
                self._compare(parts, *_few(parts, batch))
            except ConfigError as error:
                raise type(error)(f"step {self._looks}: {error}") from error
            except Exception as error:  # the program's code may raise anything
                self._stop(error)
        self._seconds += perf_counter() - begun
        if self._looks == min(parts.config.run.shadow, parts.total_steps) and not self._is_off:
            del self._ours, self._plain, self._twin
            log.info(
                "run.shadow: %d steps are as in plain torch, which took %.2g s to compare",
                self._looks, self._seconds,
            )  # fmt: skip

    def _compare(self, parts: Parts, samples: Samples, indices: Array) -> None:
        """Compare losses, gradients and updates."""
        step, run, ours, plain = parts.steps_done, parts.config.run, self._ours, self._plain
        context = Context(True, run.seed, step, indices, keyed=run.random == "keyed")
        ours.values, before = plain.values(), random_states()[:3]
        self._twin.become(ours.values, moved=True)
        try:
            found = ours.take(samples, context)
        except MISFITS as error:
            with plain.there():  # where torch cannot take them either, nothing is compared
                plain.take(samples, ours.loss, Keyed(None, {}))
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"the trainer's layers cannot take {ours.told(len(indices))} samples "
                f"({one_line(error)}); they must take any number, as layouts have micro-batches of "
                "any size"
            ) from error
        if ours.draws and not context.keyed:
            return self._stop("no copy draws the numbers of run.random = 'local'")
        drawn = ours.drawn(context)
        passed = []
        for side in (plain, self._twin):
            with side.there():
                passed.append(side.take(samples, ours.loss, drawn, moved=side is self._twin))
        wanted, other = passed
        if random_states()[:3] != before:
            raise ConfigError(
                "the module or the loss draws random numbers that are not torch's, which would "
                "follow the layout; draw them by torch"
            )
        if not np.isfinite(wanted.loss):
            return self._stop("the loss is not finite")
        wrong = first(found, wanted, other)
        if wrong and wanted.narrow != torch.float64:
            # A number next to a threshold may go either way: both sides at other numbers, too.
            ours.values = self._twin.values()
            wrong = first(ours.take(samples, context, moved=True), other, wanted) and wrong
        self._expect(wrong, indices)
        at = replace(parts.rates, factor=1.0)
        rate, grouping = at.common(step), parts.updater.grouping
        groups = {grouping(n).number: rate * grouping(n).at(step).rate for n in ours.names}
        old = plain.values()
        gradients = plain.step(wanted.gradients, parts.config.optim, groups)
        ours.values = old
        if not parts.updater.optimizer.layerwise:
            ours.step(gradients, grouping, step, rate)
        if plain.optimizer is None:
            plain.become(ours.values)
        else:
            self._expect(first_parameter(ours.values, plain.values(), old), indices)
        by_epoch = parts.config.optim.schedule_by == "epoch"
        if not by_epoch or not (step + 1) % parts.sampler.steps_per_epoch:
            plain.end_of_row()

    def _expect(self, wrong: Difference | None, indices: Array) -> None:
        """Raise ConfigError if there is a difference."""
        if wrong:
            name = self._ours.names.get(wrong.name, "")
            raise ConfigError(
                f"{wrong.told(name)} (the same {len(indices)} samples in plain torch and, as "
                f"micro-batches of {self._ours.told(len(indices))}, in the trainer's layers; "
                "run.shadow = 0 compares nothing)"
            )


def _few(parts: Parts, batch: Batch) -> tuple[Samples, Array]:
    """Some samples of a batch that this rank has read, and their numbers."""
    assert batch.held
    number = min(batch.held)
    held, indices = batch.held[number], part(batch.indices, parts.passes.parts, number)[:_FEW]
    kind = np.dtype(parts.config.run.dtype)
    x = held.inputs[:_FEW]
    return Samples(x.astype(kind) if x.dtype.kind == "f" else x, held.labels[:_FEW]), indices


def _available() -> float:
    """Bytes of memory that are free here; infinite if the system does not say it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = dict(line.split(":") for line in lines)
        return float(found["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return float("inf")
