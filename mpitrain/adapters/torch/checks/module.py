"""Checks of a module at its calls, and the search for whose random numbers it draws."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn

from mpitrain.adapters.torch.arrays import same
from mpitrain.adapters.torch.checks.probe import MISFITS, Tensors, alike, rows
from mpitrain.adapters.torch.functions.reductions import COUNT, LOSS
from mpitrain.adapters.torch.modules.calls import UNKEYED, Call, Watched
from mpitrain.adapters.torch.modules.drawing import Drawing
from mpitrain.adapters.torch.modules.draws import DrawPlace
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


def moved(call: Call) -> Call:
    """The call with numbers of a normal distribution added to its inputs."""
    source = torch.Generator().manual_seed(0)
    x = {
        name: part + torch.randn(part.shape, generator=source).to(part)
        if part.is_floating_point()
        else part
        for name, part in call.x.items()
    }
    return replace(call, x=x)


def _by_row(call: Call, places: Sequence[DrawPlace], *, together: bool) -> list[Tensors]:
    """Results by sample, where a place's numbers lie in this way, and show whose they are."""
    call.watched.draws.lay(places, together=together)
    found = call.of().tried(loud=places[0] if len(places) == 1 else True)
    found = {n: p for n, p in found.items() if n not in (LOSS, COUNT) and len(p) == len(call)}
    return [rows(found, row) for row in range(len(call))]
