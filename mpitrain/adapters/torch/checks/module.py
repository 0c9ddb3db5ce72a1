"""Check that a module is a function of its parameters and its input, and of nothing else."""

import random
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from mpitrain.adapters.torch.checks.module_class import ELSEWHERE, ImpureModule
from mpitrain.adapters.torch.checks.probe import Tensors, alike, close, one_line
from mpitrain.adapters.torch.functions.own_loss import COUNT, LOSS
from mpitrain.adapters.torch.modules.calls import UNKEYED, Call, Watched, changes
from mpitrain.adapters.torch.modules.drawing import Drawing
from mpitrain.adapters.torch.modules.draws import DrawPlace
from mpitrain.arrays import Shape
from mpitrain.nn.context import Context

_ALONE = (
    ": with its random numbers, it gives a sample another result, or none, when it is alone in its "
    "batch; keep samples apart, or set run.random = 'local' for numbers that depend on the layout"
)


def expect_the_same_trained(watched: Watched, module: nn.Module, names: Collection[str]) -> None:
    """Check that the module still trains the parameters ``names`` that the trainer took over."""
    now = {name for name, p in module.named_parameters() if p.requires_grad}
    if changed := sorted(now ^ set(names)):
        watched.say(
            f": {', '.join(changed[:3])} was frozen or unfrozen after the trainer was made, which "
            "has had the module's parameters since then; freeze before, and for another choice "
            "make another trainer"
        )


def expect_given_values(
    call: Call,
    modules: Sequence[nn.Module],
    x: Sequence[torch.Tensor],
    own: Sequence[torch.Tensor],
    context: Context,
) -> None:
    """Refuse a module that uses other values than the parameters that it is given.

    Its results and gradients must not change when the values in its own parameters become NaN.  A
    function that holds on to a module would use the initial values for ever.  A module that goes
    forward once more within the backward pass has to be given its parameters there, too.

    Args:
        call: the module; it is found out whether it goes forward once more.
        modules: modules that have the values.
        x: a batch of at least one sample, with all inputs of the module.
        own: the parameters that are given.
        context: context of the pass.

    Raises:
        ImpureModule: it does.
    """
    watched = call.watched
    context = replace(context, training=True, samples=np.arange(len(x[0])))

    def results() -> Tensors:
        given = [part.clone() for part in x]
        for part in given:
            part.requires_grad_(part.is_floating_point())
        outputs = call.tried(*given, context=context)
        y = {key: part for key, part in outputs.items() if part.requires_grad}
        wanted = [*(part for part in given if part.requires_grad), *own]
        found: Sequence[torch.Tensor] = ()
        if y and wanted:
            ones = [torch.ones_like(part) for part in y.values()]
            with call.again(context) if watched.repeats else nullcontext():
                found = torch.autograd.grad(list(y.values()), wanted, ones, materialize_grads=True)
        return {**y, **{f" {number}": part for number, part in enumerate(found)}}

    def uses_given() -> bool:
        usual = results()
        with _poisoned(modules):
            poisoned = results()
        return alike({k: v.detach() for k, v in usual.items()}, poisoned)

    for repeats in (False, True):
        watched.repeats, refused = repeats, None
        try:
            if uses_given():
                return
        except RuntimeError as error:
            refused = error
    if refused:
        raise ImpureModule(f"{watched.name} cannot go backward: {one_line(refused)}") from refused
    raise ImpureModule(
        f"{watched.name} uses values of parameters that it is not given, as in a function that "
        f"holds on to a module; call modules as attributes of their module, {ELSEWHERE}"
    )


@contextmanager
def _poisoned(modules: Sequence[nn.Module]) -> Iterator[None]:
    """The parameters' own values are NaN within this block, for every reader of their memory.

    Frozen ones may lie in a read-only file, and are replaced.
    """
    parameters = {id(p): p for module in modules for p in module.parameters()}.values()
    known = [p for p in parameters if p.is_floating_point()]
    kept = [(p, p.detach().clone() if p.requires_grad else p.data) for p in known]
    for parameter, values in kept:
        if parameter.requires_grad:
            parameter.data.fill_(torch.nan)
        else:
            parameter.data = torch.full_like(values, torch.nan)
    try:
        yield
    finally:
        for parameter, values in kept:
            if parameter.requires_grad:
                parameter.data.copy_(values)
            else:
                parameter.data = values


@torch.no_grad()
def examine(call: Call, buffers: Tensors, x: Sequence[torch.Tensor], context: Context) -> None:
    """Run a module several times and refuse it if the results are not those of a function.

    It goes forward in both modes, twice, and on the first and the last sample alone.  If it draws
    random numbers, it is found out which of them are whose.  Faults that only other inputs or later
    steps show stay unseen, and so does randomness of generators that are neither torch's nor the
    ones that Python's and NumPy's modules have, if it happens to repeat.

    Args:
        call: the module.
        buffers: the buffers that it has.
        x: a batch of at least one sample, with all inputs of the module.
        context: context of the pass.

    Raises:
        ImpureModule: with the way out.
    """
    watched, run = call.watched, call.tried
    name, values = watched.name, {inner: b.clone() for inner, b in buffers.items()}
    numbers = np.arange(len(x[0]))
    for training in (True, False):
        here = replace(context, training=training, samples=numbers)
        given = _copy(x)
        versions = [part._version for part in given]
        if context.keyed:
            watched.modes.add(training)
        run(*given, context=here)
        if versions != [part._version for part in given] or not all(map(close, given, x)):
            watched.changes_input = True
            if len(x) > 1:
                raise ImpureModule(
                    f"{name} changes one of its inputs, of which others may be views: inplace=False"
                )
        source = watched.source
        if isinstance(source, Drawing) and (source.shapes or watched.draws.plain):
            learn(call, x, here)
        elif watched.drew:
            watched.modes.add(training)
        else:
            watched.modes.discard(training)
        generators = _others()
        first, second = (run(*_copy(x), context=here) for _ in range(2))
        for inner, before in values.items():
            if not torch.equal(before, buffers[inner]):
                raise ImpureModule(f"{name}{changes(inner)}")
        if generators != _others() or not alike(first, second):
            raise ImpureModule(
                f"{name} gives two results for one input: it draws random numbers that are not "
                f"torch's, or keeps state that is no parameter; do without, {ELSEWHERE}"
            )
        is_free = training in watched.modes and not context.keyed
        if len(numbers) > 1 and not is_free and not keeps_samples_apart(call, x, here):
            raise ImpureModule(
                f"{name} gives a sample another result, or none, when it is alone in its batch, so "
                f"that training would depend on the layout of the ranks; keep samples apart, "
                f"{ELSEWHERE}"
            )


def _others() -> tuple[object, ...]:
    """States of Python's and NumPy's generators, which a module may draw from now and then."""
    numpys: Any = np.random.get_state()
    return random.getstate(), numpys[1].tobytes(), *numpys[2:]


@torch.no_grad()
def learn(call: Call, x: Sequence[torch.Tensor], context: Context) -> None:
    """Find out which of the random numbers that a module draws are whose.

    The shapes that it draws for 2 and for 3 samples show an axis along which samples lie; then each
    sample must have the result alone that it has beside another one.

    Raises:
        ImpureModule: or says so later: it cannot be found out.
    """
    watched, draws = call.watched, call.watched.draws
    known = set(draws.where)
    last = len(x[0]) - 1
    two, three = ([part[rows] for part in x] for rows in ([0, last], [0, last, 0]))
    shapes: list[dict[DrawPlace, Shape]] = []
    while len(shapes) < 2:
        was_plain, given = draws.plain, three if shapes else two
        call.tried(*_copy(given), context=replace(context, samples=np.arange(len(given[0]))))
        assert isinstance(watched.source, Drawing)
        if was_plain == draws.plain:
            shapes.append(watched.source.shapes)
    if fault := draws.settle(*shapes):
        watched.say(f": {fault}{UNKEYED}")
        return
    here = replace(context, samples=np.arange(2))

    def is_right() -> bool:
        return all(keeps_samples_apart(call, two, here, loud=loud) for loud in (True, False))

    if not is_right():
        draws.interleave(draws.where.keys() - known)
        if not is_right():
            watched.say(_ALONE)


def keeps_samples_apart(
    call: Call, x: Sequence[torch.Tensor], context: Context, *, loud: bool = False
) -> bool:
    """Whether the first and the last sample have the results alone that they have in the batch.

    Their shares in the module's own loss must be the same, too.
    """

    def own_loss(*rows: int) -> torch.Tensor:
        given = replace(context, samples=context.samples[list(rows)])
        with torch.enable_grad():  # by gradients it is known which means are in the loss
            found = call.tried(*(part[list(rows)] for part in x), context=given, loud=loud)
        return torch.stack([found[name].detach().sum() for name in (LOSS, COUNT)])

    whole, count = call.tried(*_copy(x), context=context, loud=loud), len(x[0])
    return (
        all(len(part) == count for part in _of_samples(whole).values() if part.dim())
        and all(is_alone_as(call, x, context, whole, row, loud=loud) for row in {0, count - 1})
        and (
            COUNT not in whole
            or count == 1
            or close(own_loss(0, count - 1), own_loss(0) + own_loss(count - 1))
        )
    )


def _of_samples(results: Tensors) -> Tensors:
    """Results but for the module's own loss."""
    return {name: part.detach() for name, part in results.items() if name not in (LOSS, COUNT)}


def expect_alone(
    call: Call, x: Sequence[torch.Tensor], context: Context, whole: Tensors, row: int
) -> None:
    """Check in a pass with random numbers that a sample has the results that it has alone.

    Args:
        call: the module.
        x: the input.
        context: context of the pass.
        whole: outputs of the pass.
        row: number of the sample in the input.
    """
    watched = call.watched
    if not isinstance(watched.source, Drawing) or len(x[0]) == 1:
        return
    if not is_alone_as(call, x, context, whole, row):
        watched.say(_ALONE)


@torch.no_grad()
def is_alone_as(
    call: Call,
    x: Sequence[torch.Tensor],
    context: Context,
    whole: Tensors,
    row: int,
    *,
    loud: bool = False,
) -> bool:
    """Whether a sample alone has the results that it has in the results of its batch."""
    one = slice(row, row + 1)
    alone = replace(context, samples=context.samples[one])
    try:
        found = call.tried(*(part.detach()[one].clone() for part in x), context=alone, loud=loud)
        wanted = {name: part[one] for name, part in _of_samples(whole).items()}
        return alike(wanted, _of_samples(found))
    except (RuntimeError, ValueError, TypeError, IndexError):  # a single number has no samples
        return False


def _copy(x: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [part.clone() for part in x]
