"""Checks of a module at its calls, and the search for whose random numbers it draws."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import islice
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from mpitrain.adapters.torch.arrays import named_tensors, same
from mpitrain.adapters.torch.checks.module_class import ImpureModule
from mpitrain.adapters.torch.checks.probe import (
    MISFITS,
    Saved,
    Tensors,
    alike,
    backward,
    cast,
    one_line,
    rows,
)
from mpitrain.adapters.torch.functions.reductions import COUNT, LOSS
from mpitrain.adapters.torch.modules.calls import UNKEYED, Call, Watched
from mpitrain.adapters.torch.modules.drawing import Drawing
from mpitrain.adapters.torch.modules.draws import DrawPlace
from mpitrain.adapters.torch.modules.tensor_parallel import REFUSAL, Share
from mpitrain.arrays import Shape


def without_autocast(watched: Watched) -> AbstractContextManager[Any]:
    """Say that torch.autocast is on around the trainer, and leave it off within this block."""
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            watched.say(
                ": torch.autocast is on around the trainer, which would not be on in the same "
                "places in every layout; turn it on in the module's forward(), or take "
                "run.compute = 'bfloat16'"
            )
            return torch.autocast(kind, enabled=False)
    return nullcontext()


def expect_the_same_trained(watched: Watched, module: nn.Module, names: Collection[str]) -> None:
    """Check that the module still trains the parameters ``names`` that the trainer took over."""
    now = {name for name, p in module.named_parameters() if p.requires_grad}
    if changed := sorted(now ^ set(names)):
        watched.say(
            f": {', '.join(changed[:3])} was frozen or unfrozen after the trainer was made, which "
            "has had the module's parameters since then; freeze before, and for another choice "
            "make another trainer"
        )


@contextmanager
def expect_unchanged(
    watched: Watched, own: Sequence[torch.Tensor], *, bitwise: bool
) -> Iterator[None]:
    """Check that the module does not change its parameters ``own`` within this block.

    torch counts changes but those by way of .data or NumPy, which numbers alone show: ``bitwise``.
    """
    versions = [part._version for part in own]
    before = [part.detach().clone() for part in own] if bitwise else []
    yield
    if versions != [part._version for part in own] or not all(map(same, before, own)):
        watched.say(
            " changes its parameters in its forward pass, as max_norm does, or casts them, and "
            "they are the trainer's; leave that out, or set run.dtype to the type to which it casts"
        )


@torch.no_grad()
def learn(call: Call) -> None:
    """Find out whether a module changes its inputs and draws random numbers, and whose these are.

    The shapes that it draws for 2 and for 3 samples show an axis along which samples lie.  Where a
    sample has several numbers along it, its results alone show whether these lie together.

    Raises:
        ImpureModule: or says so later: it cannot be found out.
    """
    watched, draws, mode = call.watched, call.watched.draws, call.context.training
    last = len(call) - 1
    two, three = (call.of(rows, samples=np.arange(len(rows))) for rows in ([0, last], [0, last, 0]))
    shapes: list[dict[DrawPlace, Shape]] = []
    while len(shapes) < 2:
        was_plain, given = draws.plain, (three if shapes else two).of()
        given.tried()
        watched.seen.add(mode)
        note_inputs(watched, given.x)
        source: Any = watched.source
        if mode in watched.modes and not source.drew:
            watched.modes.discard(mode)
        if mode not in watched.modes or not isinstance(source, Drawing):
            return
        if was_plain == draws.plain:
            shapes.append(source.shapes)
    places = shapes[0].keys() - draws.where.keys()
    if fault := draws.settle(*shapes):
        watched.say(f": {fault}{UNKEYED}")
        return
    several = [place for place in places if draws.has_several(place)]
    if several and not find_order(call, several):
        for place in several:
            find_order(call, [place])


def note_inputs(watched: Watched, x: Tensors) -> None:
    """Note whether a pass has changed its inputs, which were new."""
    if watched.changes_input or all(one.is_inference() or not one._version for one in x.values()):
        return
    watched.changes_input = True
    if len(x) > 1:
        watched.say(" changes one of its inputs, of which others may be views: inplace=False")


def find_order(call: Call, places: Sequence[DrawPlace]) -> bool:
    """Find out how the several numbers of samples lie at these places; False: in several ways.

    A sample's results are those that it has alone.  One is taken whose results tell, and other
    inputs where none do, as where all numbers are factors of zeros.
    """
    draws, every = call.watched.draws, [*range(len(call))] if len(call) > 1 else [0, 0]
    given = call.of(every, samples=np.arange(len(every)))
    with suppress(*MISFITS):  # a single number has no samples
        for call in given, moved(given):
            ways = [_by_row(call, places, together=way) for way in (False, True)]
            told = (n for n, both in enumerate(zip(*ways, strict=True)) if not alike(*both))
            for row in islice(told, 1):
                (alone,) = _by_row(call.of(slice(row, row + 1)), places, together=True)
                apart, together = (alike(one[row], alone) for one in ways)
                draws.lay(places, together=together or not apart)
                return apart or together
    draws.lay(places, together=True)
    return True


def moved(call: Call, names: Collection[str] = ()) -> Call:
    """The call with numbers of a normal distribution added to its inputs, and smaller ones to its
    values of these ``names``."""
    source = torch.Generator().manual_seed(0)

    def other(part: torch.Tensor, size: float = 1.0) -> torch.Tensor:
        return part + size * torch.randn(part.shape, generator=source).to(part)

    x = {name: other(p) if p.is_floating_point() else p for name, p in call.x.items()}
    values = {
        name: other(p, 0.5 / p.shape[1:].numel() ** 0.5) if name in names and p.numel() else p
        for name, p in call.values.items()
    }
    return replace(call, x=x, values=values)


def _by_row(call: Call, places: Sequence[DrawPlace], *, together: bool) -> list[Tensors]:
    """Results by sample, where a place's numbers lie in this way, and show whose they are."""
    call.watched.draws.lay(places, together=together)
    found = call.of().tried(loud=places[0] if len(places) == 1 else True)
    found = {n: p for n, p in found.items() if n not in (LOSS, COUNT) and len(p) == len(call)}
    return [rows(found, row) for row in range(len(call))]


class Comparison:
    """Comparison of a rank's share with the whole module, on a batch of at least one sample.

    Both have the values that the module was given with, and then others: zeros, small factors and
    equal columns hide what is lost between the ranks until training has changed them.
    """

    def __init__(self, own: Share, call: Call, whole: Watched, *, leads: bool) -> None:
        """``call`` of the share has values of the type and on the device of training; nobody takes
        gradients by the inputs of a layer that ``leads``."""
        self._own, self._watched, self._leads = own, call.watched, leads
        like = next((one for one in call.values.values() if one.requires_grad), None)
        like = next(iter(call.x.values())) if like is None else like

        def like_given(value: torch.Tensor) -> torch.Tensor:
            both = value.is_floating_point() and like.is_floating_point()
            return value.detach().to(like.device, like.dtype if both else value.dtype)

        values = {name: like_given(value) for name, value in named_tensors(whole.module).items()}
        self._trained = [n for n, p in whole.module.named_parameters() if p.requires_grad]
        given = replace(call, watched=whole, values=values)
        kind = torch.float32 if like.dtype.itemsize == 2 else None  # 16 bits would hide much
        wide = replace(given, values=cast(values, kind), x=cast(call.of().x, kind))
        self._calls = given, moved(wide, self._trained)

    def expect_same(self, *, training: bool) -> None:
        """Check results and gradients in a mode, on the same samples with the same random numbers.

        Raises:
            ImpureModule: they differ.
        """
        given, other = (
            one.of(training=training, samples=np.arange(len(one))) for one in self._calls
        )
        own, whole = self._watched, given.watched
        if training:
            whole.modes = set(own.modes)
            if own.modes and not given.context.keyed:
                return
            for mode in own.modes:
                learn(given.of(training=mode))
            ranks = self._own.region.group.size
            if fault := own.draws.cut_as(whole.draws, ranks):
                self._refuse(fault)
        calls = [given]
        with suppress(*MISFITS):  # the module may refuse other values, on all ranks
            other.of().tried()
            calls.append(other)
        try:
            # Each pass communicates: a rank whose results differ makes the others' passes, too.
            same = [
                self._is_same(call, loud=loud)
                for loud in ((True, False) if training and own.modes else (False,))
                for call in calls
            ]
        except MISFITS as error:  # all ranks have it, or wait for this one, and the watchdog ends
            self._refuse(f"{type(error).__name__}: {one_line(error)}")
        differs = not all(same) and not own.drew
        # A rank may see a fault in its own part of the gradients alone.
        if self._own.region.agree(differs):
            where = "" if differs else " on another rank"
            self._refuse(f"results or gradients{where} are others than those of one process")

    def _is_same(self, whole: Call, *, loud: bool) -> bool:
        parts = {n: self._own.part(n, one.detach()).clone() for n, one in whole.values.items()}
        shared = replace(whole, watched=self._watched, values=parts)
        (*own, _), (*wanted, narrow) = (self._outcome(one, loud) for one in (shared, whole))
        cut = {name: self._own.part(name, one) for name, one in wanted[1].items()}
        largest = [None, *map(_largest, wanted[1:])]
        both = zip((wanted[0], cut, wanted[2]), own, largest, strict=True)
        return all(alike(one, other, most, narrow) for one, other, most in both)

    def _outcome(self, call: Call, loud: bool) -> tuple[Tensors, Tensors, Tensors, torch.dtype]:
        """Outputs, gradients of a sum of them by the trained values and by the inputs, and the type
        with the fewest digits that has had a part in them."""
        call, saved = call.of(), Saved()
        own = {name: call.values[name] for name in self._trained}
        x = {n: one for n, one in call.x.items() if one.is_floating_point() and not self._leads}
        by = [one.requires_grad_() for one in (*own.values(), *x.values())]
        with saved:
            y = call.tried(loud=loud)
        graded = [part for part in y.values() if part.requires_grad]
        # Sums of norms' outputs, or of their squares, would have no gradients.
        dy = [
            torch.arange(part.numel(), dtype=torch.float32).cos_().reshape(part.shape).to(part)
            for part in graded
        ]
        with call.again():
            found = backward(graded, dy, by) if graded else [None] * len(by)
        dx = iter([torch.zeros_like(b) if g is None else g for b, g in zip(by, found, strict=True)])
        outputs = {name: part.detach() for name, part in y.items()}
        return outputs, dict(zip(own, dx)), dict(zip(x, dx)), saved.narrow

    def _refuse(self, fault: str) -> NoReturn:
        name = self._calls[0].watched.name
        raise ImpureModule(REFUSAL.format(name=name, fault=fault))


def _largest(tensors: Tensors) -> float:
    every = (float(one.abs().nan_to_num().max()) for one in tensors.values() if one.numel())
    return max(every, default=0.0)
