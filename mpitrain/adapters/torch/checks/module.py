"""Checks of a module at its calls, and the search for whose random numbers it draws."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from mpitrain.adapters.torch.arrays import same
from mpitrain.adapters.torch.checks.probe import MISFITS, Tensors, alike
from mpitrain.adapters.torch.functions.own_loss import COUNT, LOSS
from mpitrain.adapters.torch.modules.calls import UNKEYED, Call, Watched, changes
from mpitrain.adapters.torch.modules.drawing import Drawing
from mpitrain.adapters.torch.modules.draws import DrawPlace
from mpitrain.arrays import Shape


@contextmanager
def without_autocast(watched: Watched) -> Iterator[None]:
    """Say that torch.autocast is on around the trainer, and leave it off within this block."""
    with ExitStack() as stack:
        for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
            watched.say(
                ": torch.autocast is on around the trainer, which would not be on in the same "
                "places in every layout; turn it on in the module's forward(), or take "
                "run.compute = 'bfloat16'"
            )
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def expect_the_same_trained(watched: Watched, module: nn.Module, names: Collection[str]) -> None:
    """Check that the module still trains the parameters ``names`` that the trainer took over."""
    now = {name for name, p in module.named_parameters() if p.requires_grad}
    if changed := sorted(now ^ set(names)):
        watched.say(
            f": {', '.join(changed[:3])} was frozen or unfrozen after the trainer was made, which "
            "has had the module's parameters since then; freeze before, and for another choice "
            "make another trainer"
        )


def outcome(
    call: Call, wanted: Sequence[torch.Tensor], *, loud: bool = False
) -> tuple[Tensors, Sequence[torch.Tensor]]:
    """Outputs of a trial, and gradients of a sum of them by the ``wanted`` tensors."""
    y = call.tried(loud=loud)
    graded = [part for part in y.values() if part.requires_grad]
    found: Sequence[torch.Tensor] = [torch.zeros_like(one) for one in wanted]
    if graded and wanted:
        # Sums of norms' outputs, or of their squares, would have no gradients.
        by = [
            torch.arange(part.numel(), dtype=torch.float32).cos_().reshape(part.shape).to(part)
            for part in graded
        ]
        with call.again():
            found = torch.autograd.grad(graded, wanted, by, materialize_grads=True)
    return {name: part.detach() for name, part in y.items()}, found


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
    names = [name for name, _ in watched.module.named_buffers() if name in call.values]
    kept = [(name, call.values[name], call.values[name].clone()) for name in names]
    two, three = (call.of(rows, samples=np.arange(len(rows))) for rows in ([0, last], [0, last, 0]))
    shapes: list[dict[DrawPlace, Shape]] = []
    while len(shapes) < 2:
        was_plain, given = draws.plain, (three if shapes else two).of()
        given.tried()
        watched.seen.add(mode)
        for name, one, before in kept:  # torch does not count every change
            if not torch.equal(one, before):
                watched.say(changes(name))
        if not watched.changes_input and any(map(_is_changed, given.x.values())):
            watched.changes_input = True
            if len(given.x) > 1:
                watched.say(
                    " changes one of its inputs, of which others may be views: inplace=False"
                )
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
    known = [draws.where[place] for place in places if place in draws.where]
    has_several = any(own.axis is not None and own.shape[own.axis] > 1 for own in known)
    if has_several and not keeps_samples_apart(two):
        draws.interleave(places & draws.where.keys())


def _is_changed(part: torch.Tensor) -> bool:
    return not part.is_inference() and part._version > 0


def keeps_samples_apart(call: Call) -> bool:
    """Whether the first and the last sample draw numbers alone that they draw in the batch."""
    whole, count = call.of().tried(loud=True), len(call)
    return all(len(part) == count for part in whole.values() if part.dim()) and all(
        _is_alone_as(call, whole, row) for row in {0, count - 1}
    )


def _is_alone_as(call: Call, whole: Tensors, row: int) -> bool:
    """Whether a sample alone has the results that it has in the results of its batch."""
    one = slice(row, row + 1)
    try:
        found = call.of(one).tried(loud=True)
        wanted = {name: part[one] for name, part in _of_samples(whole).items()}
        return alike(wanted, _of_samples(found))
    except MISFITS:  # a single number has no samples
        return False


def _of_samples(results: Tensors) -> Tensors:
    """Results but for the module's own loss."""
    return {name: part.detach() for name, part in results.items() if name not in (LOSS, COUNT)}
