"""Comparison of the first steps with plain torch."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any
from warnings import catch_warnings
from weakref import ref

import numpy as np
import torch

from collectives.errors import words
from mpitrain.adapters.torch.arrays import named_tensors
from mpitrain.adapters.torch.checks.module_class import untouched
from mpitrain.adapters.torch.checks.probe import MISFITS, one_line
from mpitrain.adapters.torch.shadow.differences import Difference, Passed, first, first_parameter
from mpitrain.adapters.torch.shadow.ours import Ours
from mpitrain.adapters.torch.shadow.plain import Plain
from mpitrain.arrays import Array
from mpitrain.config import ConfigError
from mpitrain.data import Samples
from mpitrain.data.generators import kept_generators, random_states
from mpitrain.memory import available
from mpitrain.nn.context import Context
from mpitrain.training.batches import part
from mpitrain.training.loop import FEW, Batch
from mpitrain.training.parts import Parts

log = logging.getLogger("mpitrain")

#: Samples that are taken at most, in the second step; parameters, gradients and states of all
#: copies, in sizes of the module; seconds after which nothing more is compared.
_MANY, _COPIES, _SECONDS = 64, 12, 60.0


class Shadow:
    """Compares what the trainer's layers train with what plain torch trains.

    In each of the first ``run.shadow`` steps, some samples of the batch go through the module as
    in a loop of torch, and through copies of the trainer's layers as unequal micro-batches.  Both
    have the same parameters, and their optimisers the same gradients, so that rounding does not add
    up; another loop, moved by one ulp, says how much it matters.  All begin before the first step,
    when it is known what layers change and the loss reads.  Nothing of it is part of the run.
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
        self._looks, self._compared, self._seconds, self._is_off = 0, 0, 0.0, False
        self._made: Callable[[], Any] = lambda: None

    def _begin(self, parts: Parts) -> None:
        """Make the sides that are compared."""
        module, layers, dtype = self._module, self._layers, parts.config.run.dtype
        numbers = sum(one.numel() for one in named_tensors(module).values())
        size = _COPIES * numbers * np.dtype(dtype).itemsize
        if size > available() / 2:
            raise MemoryError(f"copies of the module would take {size >> 20} MiB")
        self._ours = Ours(module, layers, parts.model.loss, dtype)
        self._plain, self._twin = (Plain(module, layers, dtype) for _ in range(2))
        self._names = {own: name for name, own in parts.objects.names.items()}
        table = parts.rates.table
        is_scheduler = table and table.options is not None and not table.follows
        if self._factory:
            with self._plain.there():
                self._plain.optimise(self._factory, self._schedule if is_scheduler else None)
            self._made = ref(self._plain.optimizer)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimiser that the program's function has made here, as long as somebody has it."""
        return self._made()

    def follow(self, changed: Mapping[str, Mapping[str, Any]]) -> None:
        """Take attributes that the program has set, by the names of the module's parts."""
        for side in (vars(self).get(name) for name in ("_ours", "_plain", "_twin")):
            if side:
                side.follow(changed)

    def _end(self) -> None:
        """Compare nothing more, and free the copies."""
        self._is_off = True
        for name in ("_ours", "_plain", "_twin"):
            vars(self).pop(name, None)

    def __call__(self, parts: Parts, batch: Batch) -> None:
        """Compare a step that is to come; ConfigError: the trainer would train something else."""
        self._looks += 1
        if self._is_off or not batch.held:
            return
        if parts.steps_done + 1 != self._looks:  # a step was left out, or done before: none fits
            return self._tell(is_last=False) if self._compared else self._end()
        begun = perf_counter()
        with kept_generators():
            try:
                if self._looks == 1:
                    self._begin(parts)
                samples, indices = _taken(parts, batch, self._count(batch))
                self._compared += self._compare(parts, samples, indices)
                table, step = parts.rates.table, parts.steps_done
                if self._plain.scheduler and table and table.row(step + 1) > table.row(step):
                    with catch_warnings(action="ignore"):  # without an update that was compared
                        self._plain.scheduler.step()
            except ConfigError as error:
                raise type(error)(f"step {self._looks}: {error}") from error
            except Exception as error:  # the program's code may raise anything
                told = one_line(words(error))
                log.warning("run.shadow is off, as it cannot compare with plain torch: %s", told)
                self._end()
        self._seconds += perf_counter() - begun
        is_last = self._looks == min(parts.config.run.shadow, parts.total_steps)
        if not self._is_off and (is_last or self._seconds > _SECONDS):
            if not self._compared:
                why = "too few samples, or no finite loss"
                log.warning("run.shadow: nothing was compared with plain torch: %s", why)
                return self._end()
            self._tell(is_last=is_last)

    def _tell(self, *, is_last: bool) -> None:
        """Say what was compared, and end."""
        log.info(
            "run.shadow: %d step%s as in plain torch, which took %.2g s to compare%s",
            self._compared, " is" if self._compared == 1 else "s are", self._seconds,
            "" if is_last else "; the others are left out",
        )  # fmt: skip
        self._end()

    def _count(self, batch: Batch) -> int:
        """Number of samples: once that of the batch, as code may go by it, if that is no burden."""
        if self._looks != 2 or not self._plain.held:
            return FEW
        times = min(available() / 4 / self._plain.held, _SECONDS / 4 / max(self._seconds, 1e-9))
        return max(FEW, min(len(batch.indices[0]), _MANY, int(FEW * times)))

    def _compare(self, parts: Parts, samples: Samples, indices: Array) -> bool:
        """Compare losses, gradients and updates; False: the samples are too few for it."""
        step, run, ours, plain = parts.steps_done, parts.config.run, self._ours, self._plain
        context = Context(True, run.seed, step, indices, keyed=run.random == "keyed")
        ours.values, before = plain.values(), random_states()[:3]
        self._twin.become(ours.values, moved=True)
        try:
            found = ours.compute(samples, context)
        except ConfigError:
            if self._refused(samples):  # few samples alone, as batch norm refuses a single value
                ours.take_back()
                return False
            raise
        except Exception as error:  # the program's code may raise anything
            if isinstance(error, MISFITS) or not self._refused(samples):
                raise self._misfit(error, samples, run.dtype) from error
            raise
        drawn, passed = ours.drawn(context), []
        if drawn and not context.keyed:
            raise TypeError("no copy draws the numbers of run.random = 'local'")
        names = {n: self._names[n] for n in ours.state if n in self._names}
        for side in (plain, self._twin):
            with side.there():
                moved = side is self._twin
                passed.append(side.compute(samples, ours.loss, drawn, names, moved=moved))
        wanted, other = passed
        if random_states()[:3] != before:
            raise ConfigError(
                "the module or the loss draws random numbers that are not torch's, which would "
                "follow the layout; draw them by torch"
            )
        if not np.isfinite(wanted.loss):
            return False
        wrong = first(found, wanted, other)
        if wrong and wanted.narrow != torch.float64:
            # A number next to a threshold may go either way: both sides at other numbers, too.
            ours.values = self._twin.values()
            wrong = first(ours.compute(samples, context, moved=True), other, wanted) and wrong
        self._expect(wrong, indices)
        self._update(parts, wanted, indices)
        return True

    def _misfit(self, error: Exception, samples: Samples, kind: str) -> ConfigError:
        """The error of samples that the trainer's layers cannot take, and perhaps torch neither."""
        who = f"the trainer's layers cannot take {self._ours.told(len(samples))} samples"
        cure = "they must take any number, as layouts have micro-batches of any size"
        if own := self._refused(samples):
            who, error = f"torch itself cannot take {len(samples)} samples in {kind}", own
            cure = "let module and loss keep to the type of what they get, as by weight.to(outputs)"
        return ConfigError(f"{who} ({one_line(words(error))}); {cure}")

    def _refused(self, samples: Samples) -> Exception | None:
        """The error of plain torch with these samples, if there is one; nothing has changed."""
        module = self._plain.module
        with self._plain.there(), untouched(module):
            every = named_tensors(module)
            kept = {name: value.detach().clone() for name, value in every.items()}
            try:
                self._plain.compute(samples, self._ours.loss, None, {})
            except Exception as error:
                return error
            finally:
                for name, value in kept.items():
                    every[name].data.copy_(value)
        return None

    def _update(self, parts: Parts, wanted: Passed, indices: Array) -> None:
        """Let both optimisers update the same parameters by torch's gradients, and compare them."""
        step, ours, plain, updater = parts.steps_done, self._ours, self._plain, parts.updater
        at, grouping = replace(parts.rates, factor=1.0), updater.grouping
        rate = at.common(step)
        rates = {grouping(n).number: rate * grouping(n).at(step).rate for n in ours.values}
        old = plain.values()
        gradients = plain.step(wanted.gradients, parts.config.optim, rates, at.scaled)
        ours.values = old
        if not updater.optimizer.layerwise:
            ours.step(gradients, grouping, step, rate)
        if plain.optimizer is None:
            plain.become(ours.values)
        else:
            self._expect(first_parameter(ours.values, plain.values(), old), indices)

    def _expect(self, wrong: Difference | None, indices: Array) -> None:
        """Raise ConfigError if there is a difference."""
        if wrong:
            told, count = wrong.told(self._names.get(wrong.name, "")), len(indices)
            raise ConfigError(
                f"{told} (the same {count} samples in plain torch and, as micro-batches of "
                f"{self._ours.told(count)}, in the trainer's layers; run.shadow = 0 compares "
                "nothing)"
            )


def _taken(parts: Parts, batch: Batch, count: int) -> tuple[Samples, Array]:
    """Samples of a batch that this rank has read, and their numbers; several times for many."""
    held = batch.held or {}
    forms = {n: [(a.dtype, a.shape[1:]) for a in (s.inputs, s.labels)] for n, s in held.items()}
    alike = [n for n in sorted(held) if forms[n] == forms[min(held)]]  # not padded otherwise
    own = np.concatenate([part(batch.indices, parts.passes.micro_batches, n) for n in alike])
    rows = np.tile(np.arange(len(own)), 1 if count == FEW else count)[:count]
    x, labels = (
        np.concatenate([getattr(held[n], name) for n in alike])[rows]
        for name in ("inputs", "labels")
    )
    kind = np.dtype(parts.config.run.dtype)
    x = x.astype(kind) if x.dtype.kind == "f" else x
    return Samples(x, labels), own[rows]
