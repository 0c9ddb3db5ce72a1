"""Comparison of what tensor ranks have of a module with the whole module, before it trains."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any, NoReturn

import numpy as np
import torch

from mpitrain.adapters.torch.arrays import named_tensors
from mpitrain.adapters.torch.checks.module import learn
from mpitrain.adapters.torch.checks.module_class import ImpureModule, log, untouched
from mpitrain.adapters.torch.checks.probe import MISFITS, Tensors, alike, backward, cast, one_line
from mpitrain.adapters.torch.modules.calls import Call, Watched
from mpitrain.adapters.torch.modules.tensor_parallel import REFUSAL, Share
from mpitrain.memory import available

#: Sizes of the noise on a module's values, as parts of usual weights; the first one counts that the
#: module takes.
_GIVEN, _NEAR = (0.0,), (0.1, 0.003)


@contextmanager
def _at_full_width() -> Iterator[None]:
    """Code within this block, as a module's ``forward()``, enters ``torch.autocast`` in vain."""
    autocast: Any = torch.autocast
    own = autocast.__enter__, autocast.__exit__
    autocast.__enter__, autocast.__exit__ = lambda given: given, lambda *given: None
    try:
        yield
    finally:
        autocast.__enter__, autocast.__exit__ = own


class Comparison:
    """Comparison of a rank's share with the whole module, on a batch of at least one sample.

    Both have the values that the module was given with, and then others near them: zeros, small
    factors and equal columns hide what is lost between the ranks until training has changed them.
    They compute in float64 if the module can, where rounding hides little and turns few branches.
    """

    def __init__(self, own: Share, call: Call, whole: Watched, *, is_first: bool) -> None:
        """``call`` of the share has values of the type and on the device of training; nobody takes
        gradients by the inputs of a layer that ``is_first``."""
        self._own, self._group = own, own.region.group
        self._watched, self._is_first = call.watched, is_first
        like = next((one for one in call.values.values() if one.requires_grad), None)
        like = next(iter(call.x.values())) if like is None else like

        def like_given(value: torch.Tensor) -> torch.Tensor:
            both = value.is_floating_point() and like.is_floating_point()
            return value.detach().to(like.device, like.dtype if both else value.dtype)

        values = {name: like_given(value) for name, value in named_tensors(whole.module).items()}
        self._trained = [n for n, p in whole.module.named_parameters() if p.requires_grad]
        self._whole = replace(call, watched=whole, values=values)
        own_kind = [like.dtype] * like.is_floating_point()
        self._kinds = dict.fromkeys((torch.float64, torch.float32, *own_kind))

    def expect_same(self, *, training: bool) -> None:
        """Check results and gradients in a mode, on the same samples with the same random numbers.

        Raises:
            ImpureModule: they differ.
        """
        whole = self._whole.of(training=training, samples=np.arange(len(self._whole)))
        own = self._watched
        if training:
            whole.watched.modes = set(own.modes)
            if own.modes and not whole.context.keyed:
                return
            for mode in own.modes:
                learn(whole.of(training=mode))
            if fault := own.draws.cut_as(whole.watched.draws, self._group.size):
                self._refuse(fault)
        ways: list[tuple[Sequence[float], bool]] = [(_GIVEN, False), (_NEAR, False)]
        ways += [(_GIVEN, True)] if training and own.modes else []
        try:
            with _at_full_width():
                # Each pass communicates: a rank whose results differ makes the others' passes, too.
                same = [self._is_same(whole, *way) for way in ways]
        except MISFITS as error:  # all ranks have it, or wait for this one, and the watchdog ends
            self._refuse(f"{type(error).__name__}: {one_line(error)}")
        differs = not all(same) and not own.drew
        # A rank may see a fault in its own part of the gradients alone.
        if self._own.region.agree(differs):
            where = "" if differs else " on another rank"
            self._refuse(f"results or gradients{where} are others than those of one process")

    def _is_same(self, whole: Call, sizes: Sequence[float], loud: bool) -> bool:
        """Compare them with values that the module takes: moved by one of these ``sizes``."""
        for size, kind in product(sizes, self._kinds):
            error = None
            try:
                call = self._moved(whole, size, kind)
                wanted = self._outcome(call, loud)
                if size and not all(map(_is_finite, wanted)):
                    raise ValueError("numbers are not finite")
            except Exception as found:
                error = found
            if not self._own.region.agree(error is not None):
                break
        else:
            if sizes is _GIVEN:
                raise error or RuntimeError("another rank cannot compute it alone")
            if not self._group.rank:
                log.warning(
                    "parallel.tensor: %s was compared with one process on its own values alone, as "
                    "it takes none near them: %s", whole.watched.name, one_line(error),
                )  # fmt: skip
            return True
        parts = {n: self._own.part(n, one.detach()).clone() for n, one in call.values.items()}
        own = self._outcome(replace(call, watched=self._watched, values=parts), loud)
        cut = {name: self._own.part(name, one) for name, one in wanted[1].items()}
        both = zip((wanted[0], cut, wanted[2]), own, map(_largest, wanted), strict=True)
        return all(alike(one, other, most) for one, other, most in both)

    def _moved(self, whole: Call, size: float, kind: torch.dtype) -> Call:
        """The call with numbers of this type, moved by normal noise of this size beside weights."""
        numbers, ranks = sum(one.numel() for one in whole.values.values()), self._group.size
        if kind is torch.float64 and 64 * numbers > available() / 2 / ranks:
            raise MemoryError(f"copies in {kind} would take {64 * numbers >> 20} MiB")
        source, values = torch.Generator().manual_seed(0), dict(cast(whole.values, kind))
        for name in self._trained if size else ():
            one = values[name]
            noise = torch.randn(one.shape, generator=source).to(one)
            values[name] = one.detach() + size * noise / max(one.shape[1:].numel(), 1) ** 0.5
        return replace(whole, values=values, x=cast(whole.x, kind))

    def _outcome(self, call: Call, loud: bool) -> tuple[Tensors, Tensors, Tensors]:
        """Outputs, and gradients of a sum of them by the trained values and by the inputs."""
        call = call.of()
        own = {name: call.values[name] for name in self._trained}
        x = {n: one for n, one in call.x.items() if one.is_floating_point() and not self._is_first}
        by = [one.requires_grad_() for one in (*own.values(), *x.values())]
        # A module may change its inputs, which leaves of a graph must not be.
        call = replace(call, x={name: one.clone() for name, one in call.x.items()})
        with untouched(call.watched.module):
            y = call.tried(loud=loud)
            graded = [part for part in y.values() if part.requires_grad]
            # Sums of norms' outputs, or of their squares, would have no gradients.
            dy = [
                torch.arange(part.numel(), dtype=torch.float32).cos_().reshape(part.shape).to(part)
                for part in graded
            ]
            with call.again():
                found = backward(graded, dy, by) if graded else [None] * len(by)
        every = iter([torch.zeros_like(b) if g is None else g for b, g in zip(by, found)])
        outputs = {name: part.detach() for name, part in y.items()}
        return outputs, dict(zip(own, every)), dict(zip(x, every))

    def _refuse(self, fault: str) -> NoReturn:
        name = self._whole.watched.name
        raise ImpureModule(REFUSAL.format(name=name, fault=fault))


def _is_finite(tensors: Tensors) -> bool:
    return all(bool(one.isfinite().all()) for one in tensors.values())


def _largest(tensors: Tensors) -> float:
    """The largest number, as rounding goes by it; of numbers that ought to be zero, what rounding
    leaves of such near one."""
    every = [one for one in tensors.values() if one.is_floating_point() and one.numel()]
    floors = (64 * torch.finfo(one.dtype).eps ** 0.5 for one in every)
    return max((*floors, *(float(one.abs().nan_to_num().max()) for one in every)), default=0.0)
