"""Check that a module is a function of its parameters and its input, and of nothing else."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import nn

from mpitrain.adapters.torch.arrays import same
from mpitrain.adapters.torch.checks.module_class import ELSEWHERE, ImpureModule
from mpitrain.adapters.torch.checks.probe import MISFITS, Tensors, alike, close
from mpitrain.adapters.torch.functions.own_loss import COUNT, LOSS
from mpitrain.adapters.torch.modules.calls import UNKEYED, Call, Watched
from mpitrain.adapters.torch.modules.drawing import Drawing
from mpitrain.adapters.torch.modules.draws import DrawPlace
from mpitrain.arrays import Shape
from mpitrain.data.generators import random_states

_ALONE = (
    ": with its random numbers, it gives a sample another result, or none, when it is alone in its "
    "batch; keep samples apart, or set run.random = 'local' for numbers that depend on the layout"
)


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
def examine(call: Call) -> None:
    """Run a module several times and refuse it if the results are not those of a function.

    It goes forward in both modes, twice, and on the first and the last sample alone.  If it draws
    random numbers, it is found out which of them are whose.  Faults that only other inputs or later
    steps show stay unseen, and so does randomness of generators that are neither torch's nor the
    ones that Python's and NumPy's modules have, if it happens to repeat.

    Args:
        call: the module and a batch of at least one sample.

    Raises:
        ImpureModule: with the way out.
    """
    watched, name = call.watched, call.watched.name
    for training in (True, False):
        here = call.of(training=training, samples=np.arange(len(call)))
        if here.context.keyed:
            watched.modes.add(training)
        given = here.of()
        given.tried()
        if any(part._version for part in given.x.values()) or not alike(given.x, here.x):
            watched.changes_input = True
            if len(here.x) > 1:
                raise ImpureModule(
                    f"{name} changes one of its inputs, of which others may be views: inplace=False"
                )
        source = watched.source
        if isinstance(source, Drawing) and (source.shapes or watched.draws.plain):
            learn(here)
        elif watched.drew:
            watched.modes.add(training)
        else:
            watched.modes.discard(training)
        states = random_states()
        first, second = (here.of().tried() for _ in range(2))
        if states != random_states() or not alike(first, second):
            raise ImpureModule(
                f"{name} gives two results for one input: it draws random numbers that are not "
                f"torch's, or keeps state that is no parameter; do without, {ELSEWHERE}"
            )
        is_free = training in watched.modes and not here.context.keyed
        if len(here) > 1 and not is_free and not keeps_samples_apart(here):
            raise ImpureModule(
                f"{name} gives a sample another result, or none, when it is alone in its batch, so "
                f"that training would depend on the layout of the ranks; keep samples apart, "
                f"{ELSEWHERE}"
            )


@torch.no_grad()
def learn(call: Call) -> None:
    """Find out which of the random numbers that a module draws are whose.

    The shapes that it draws for 2 and for 3 samples show an axis along which samples lie; then each
    sample must have the result alone that it has beside another one.

    Raises:
        ImpureModule: or says so later: it cannot be found out.
    """
    watched, draws = call.watched, call.watched.draws
    known, last = set(draws.where), len(call) - 1
    two, three = (call.of(rows, samples=np.arange(len(rows))) for rows in ([0, last], [0, last, 0]))
    shapes: list[dict[DrawPlace, Shape]] = []
    while len(shapes) < 2:
        was_plain = draws.plain
        (three if shapes else two).of().tried()
        assert isinstance(watched.source, Drawing)
        if was_plain == draws.plain:
            shapes.append(watched.source.shapes)
    if fault := draws.settle(*shapes):
        watched.say(f": {fault}{UNKEYED}")
        return

    def is_right() -> bool:
        return all(keeps_samples_apart(two, loud=loud) for loud in (True, False))

    if not is_right():
        draws.interleave(draws.where.keys() - known)
        if not is_right():
            watched.say(_ALONE)


def keeps_samples_apart(call: Call, *, loud: bool = False) -> bool:
    """Whether the first and the last sample have the results alone that they have in the batch.

    Their shares in the module's own loss must be the same, too.
    """

    def own_loss(*rows: int) -> torch.Tensor:
        with torch.enable_grad():  # by gradients it is known which means are in the loss
            found = call.of(list(rows)).tried(loud=loud)
        return torch.stack([found[name].detach().sum() for name in (LOSS, COUNT)])

    whole, count = call.of().tried(loud=loud), len(call)
    return (
        all(len(part) == count for part in _of_samples(whole).values() if part.dim())
        and all(_is_alone_as(call, whole, row, loud=loud) for row in {0, count - 1})
        and (
            COUNT not in whole
            or count == 1
            or close(own_loss(0, count - 1), own_loss(0) + own_loss(count - 1))
        )
    )


def _of_samples(results: Tensors) -> Tensors:
    """Results but for the module's own loss."""
    return {name: part.detach() for name, part in results.items() if name not in (LOSS, COUNT)}


def expect_alone(call: Call, whole: Tensors, row: int) -> None:
    """Check in a pass with random numbers, which gave ``whole``, that a sample has its own ones.

    The sample in this ``row`` of the input must have the results alone that it has in the batch.
    """
    draws = isinstance(call.watched.source, Drawing)
    if draws and len(call) > 1 and not _is_alone_as(call, whole, row):
        call.watched.say(_ALONE)


@torch.no_grad()
def _is_alone_as(call: Call, whole: Tensors, row: int, *, loud: bool = False) -> bool:
    """Whether a sample alone has the results that it has in the results of its batch."""
    one = slice(row, row + 1)
    try:
        found = call.of(one).tried(loud=loud)
        wanted = {name: part[one] for name, part in _of_samples(whole).items()}
        return alike(wanted, _of_samples(found))
    except MISFITS:  # a single number has no samples
        return False
