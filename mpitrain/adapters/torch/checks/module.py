"""Check that a module is a function of its parameters and its input, and of nothing else."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from mpitrain.adapters.torch.checks.module_class import ELSEWHERE, ImpureModule
from mpitrain.adapters.torch.checks.probe import Tensors, alike, close, one_line
from mpitrain.adapters.torch.own_loss import COUNT, LOSS, OwnLoss
from mpitrain.nn.layer import Verdict

Run = Callable[..., Tensors]


class Watched(nn.Module):
    """A module that notices when it changes a buffer or draws random numbers.

    Attributes:
        changes_input: whether the module computes in the place of its input, which belongs to
            another layer; it is given a copy.
        own_loss: calls the module.
        only_loss: whether other outputs than the module's own loss are left out.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.name = name
        self.module = module
        self.changes_input = any(getattr(part, "inplace", False) for part in module.modules())
        self.verdict = Verdict()
        self.own_loss = OwnLoss(self.say)
        self.only_loss = False

    def say(self, fault: str) -> None:
        """Raise :class:`ImpureModule`, now or later; the text follows the module's name."""
        self.verdict.say(ImpureModule(f"{self.name}{fault}"))

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> Tensors:
        """The module's outputs by name (:mod:`mpitrain.fields`); generators stay as they are.

        Raises:
            ImpureModule: the module draws random numbers, changes a buffer, or gives no tensors.
        """
        states = [(generator, generator.get_state()) for generator in _generators()]
        before = [(b, b._version) for b in self.module.buffers()]
        outputs: Tensors = self.own_loss(self.module, args, kwargs)
        drawn_from = [one for one in states if not torch.equal(one[1], one[0].get_state())]
        for generator, state in drawn_from:
            generator.set_state(state)
        if drawn_from:
            self.say(
                " draws random numbers in its forward pass, which would differ from layout to "
                f"layout; do without dropout, {ELSEWHERE}"
            )
        after = dict(self.module.named_buffers())
        for (buffer, version), (inner, found) in zip(before, after.items()):
            if found is not buffer or found._version != version:
                self.say(_changes(inner))
        if len(after) != len(before):
            self.say(_changes("a new one"))
        if self.only_loss and COUNT in outputs:
            outputs = {name: outputs[name] for name in (LOSS, COUNT)}
        for part in outputs.values():
            if not isinstance(part, torch.Tensor):
                raise ImpureModule(
                    f"{self.name} returns a {type(part).__name__}; a layer returns a tensor, or a "
                    "tuple or dictionary of tensors"
                )
        return outputs


def _generators() -> list[torch.Generator]:
    """torch's generators of random numbers: the CPU's, and that of the GPU in use."""
    if not torch.cuda.is_initialized():
        return [torch.default_generator]
    return [torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]]


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
    name: str,
    modules: Sequence[nn.Module],
    run: Run,
    x: Sequence[torch.Tensor],
    own: Sequence[torch.Tensor],
) -> None:
    """Refuse a module that uses other values than the parameters that it is given.

    Its results and gradients must not change when the values in its own parameters become NaN.  A
    function that holds on to a module, or goes forward once more within the backward pass, would
    use the initial values for ever.

    Raises:
        ImpureModule: it does.
    """

    def results() -> Tensors:
        given = [part.clone() for part in x]
        for part in given:
            part.requires_grad_(part.is_floating_point())
        y = {key: part for key, part in run(*given).items() if part.requires_grad}
        wanted = [*(part for part in given if part.requires_grad), *own]
        found: Sequence[torch.Tensor] = ()
        if y and wanted:
            ones = [torch.ones_like(part) for part in y.values()]
            found = torch.autograd.grad(list(y.values()), wanted, ones, materialize_grads=True)
        return {**y, **{f" {number}": part for number, part in enumerate(found)}}

    try:
        usual = results()
        with _poisoned(modules):
            poisoned = results()
    except RuntimeError as error:
        raise ImpureModule(f"{name} cannot go backward: {one_line(error)}") from error
    if not alike({k: v.detach() for k, v in usual.items()}, poisoned):
        raise ImpureModule(
            f"{name} uses values of parameters that it is not given: in a function that holds on "
            "to a module, or by torch.utils.checkpoint, for which there is parallel.recompute; "
            f"call modules as attributes of their module, {ELSEWHERE}"
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
def examine(watched: Watched, run: Run, buffers: Tensors, x: Sequence[torch.Tensor]) -> None:
    """Run a module several times and refuse it if the results are not those of a function.

    It goes forward twice in training mode, once in evaluation mode, and on the first sample alone.
    Faults that only other inputs or later steps show stay unseen, and so does randomness that does
    not come from torch's generator and happens to repeat.

    Args:
        watched: the module.
        run: its forward pass, which has these ``buffers``.
        x: a batch of at least one sample, with all inputs of the module.

    Raises:
        ImpureModule: with the way out.
    """
    name, values = watched.name, {inner: b.clone() for inner, b in buffers.items()}
    with modes_kept(watched.module):
        watched.module.train()
        given = _copy(x)
        versions = [part._version for part in given]
        first, second = run(*given), run(*_copy(x))
        if versions != [part._version for part in given] or not all(map(close, given, x)):
            watched.changes_input = True
            if len(x) > 1:
                raise ImpureModule(
                    f"{name} changes one of its inputs, of which others may be views: inplace=False"
                )
        for inner, before in values.items():
            if not torch.equal(before, buffers[inner]):
                raise ImpureModule(f"{name}{_changes(inner)}")
        if not alike(first, second):
            raise ImpureModule(
                f"{name} gives two results for one input in training: it draws random numbers, or "
                f"keeps state that is no parameter; do without, {ELSEWHERE}"
            )
        watched.module.eval()
        if not alike(first, run(*_copy(x))):
            raise ImpureModule(
                f"{name} gives other results in evaluation than in training mode, and the trainer "
                f"knows one mode only; make its forward pass independent of .training, {ELSEWHERE}"
            )
    if len(x[0]) > 1 and not _keeps_samples_apart(run, x):
        raise ImpureModule(
            f"{name} gives a sample another result, or none, when it is alone in its batch, so "
            "that training would depend on the layout of the ranks; keep samples apart, "
            f"{ELSEWHERE}"
        )


def _keeps_samples_apart(run: Run, x: Sequence[torch.Tensor]) -> bool:
    def own(results: Tensors) -> Tensors:
        return {name: part for name, part in results.items() if name not in (LOSS, COUNT)}

    whole = own(run(*_copy(x)))
    try:
        alone = own(run(*(part[:1].clone() for part in x)))
        return all(len(part) == len(x[0]) for part in whole.values()) and alike(
            {name: part[:1] for name, part in whole.items()}, alone
        )
    except (RuntimeError, ValueError, TypeError):  # a single number has no first sample
        return False


def _copy(x: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [part.clone() for part in x]


def _changes(inner: str) -> str:
    return (
        f" changes its buffer {inner} in its forward pass, and the trainer neither averages "
        f"nor saves that; keep buffers constant, {ELSEWHERE}"
    )


@contextmanager
def modes_kept(module: nn.Module) -> Iterator[None]:
    """Each part of a module is in its own mode again after this block."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
