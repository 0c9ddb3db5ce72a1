"""Whether a module is a function of its parameters and its input, and of nothing else."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from mpitrain.config import ConfigError
from mpitrain.fields import named
from mpitrain.nn.layer import Verdict

Tensors = Mapping[str, torch.Tensor]
Run = Callable[..., Tensors]
_ELSEWHERE = "or train it with DataParallel in a loop of your own"

#: Whose results are random in training, and the number that says so.
_RANDOM: tuple[tuple[type[nn.Module] | tuple[type[nn.Module], ...], str], ...] = (
    (nn.modules.dropout._DropoutNd, "p"),
    ((nn.RNNBase, nn.MultiheadAttention), "dropout"),
)
_ALWAYS_RANDOM = (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def is_due(calls: int) -> bool:
    """Whether the latest of ``calls`` is to be looked at: the first, second, fourth, eighth one."""
    return calls & (calls - 1) == 0


class ImpureModule(ConfigError):
    """A module that the trainer cannot have as a layer."""


def refuse(name: str, module: nn.Module) -> None:
    """Refuse what its classes, parameters and buffers show.

    Raises:
        ImpureModule: with the name of the part and what to do instead.
    """
    for inner, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise ImpureModule(
                f"{name}{inner and f'.{inner}'} is compiled by torch.jit, and the trainer gives "
                "modules other parameters for each call; give the module that it was made of"
            )
    for inner, part in module.named_modules():
        what = f"{name}{inner and f'.{inner}'} ({type(part).__name__})"
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            raise ImpureModule(
                f"{what}: its results depend on which samples are in a micro-batch, and so on the "
                f"layout of the ranks; use GroupNorm or LayerNorm, {_ELSEWHERE}"
            )
        if getattr(part, "track_running_stats", False):
            raise ImpureModule(
                f"{what}: it changes its running statistics in training; use "
                f"track_running_stats=False, {_ELSEWHERE}"
            )
        for kind, number in _RANDOM:
            if isinstance(part, kind) and getattr(part, number) > 0:
                raise ImpureModule(
                    f"{what}: it draws random numbers in training, which would differ from layout "
                    f"to layout; set {number}=0, {_ELSEWHERE}"
                )
        if getattr(part, "scale_grad_by_freq", False):
            raise ImpureModule(
                f"{what}: it divides gradients by how often a row is in a micro-batch, which "
                f"depends on the layout of the ranks; set scale_grad_by_freq=False, {_ELSEWHERE}"
            )
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
            raise ImpureModule(
                f"{what}: its gradients are sparse, and the trainer has dense ones alone; set "
                "sparse=False"
            )
        if isinstance(part, _ALWAYS_RANDOM):
            raise ImpureModule(
                f"{what}: it draws random numbers, which would differ from layout to layout; use "
                f"another, {_ELSEWHERE}"
            )
    for inner, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if nn.parameter.is_lazy(tensor) or tensor.device.type != "cpu":
            raise ImpureModule(
                f"{name}.{inner} lies on {tensor.device}, or has no shape yet; layers of the "
                "trainer need values on the CPU: module.cpu(), and run lazy modules once"
            )
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise ImpureModule(
                f"{name}.{inner} is {'quantised' if tensor.is_quantized else tensor.layout}; "
                "layers of the trainer have dense values alone: to_dense() or dequantize()"
            )
    for inner, parameter in module.named_parameters():
        if parameter.requires_grad and not parameter.is_floating_point():
            raise ImpureModule(
                f"{name}.{inner} is of {parameter.dtype}, and the trainer has real numbers alone"
            )
    if inner := hooked(module):
        raise ImpureModule(
            f"{name}.{inner} has a hook on its gradient, which the trainer would not call; "
            f"put it into the loss or the optimizer, {_ELSEWHERE}"
        )


def keeps_running(part: nn.Module) -> bool:
    """Whether it is a batch norm whose running values change in training."""
    return (
        isinstance(part, nn.modules.batchnorm._BatchNorm)
        and part.track_running_stats
        and part.running_mean is not None
    )


def is_held(part: nn.Module, training: bool) -> bool:
    """Whether a part is in evaluation mode within a module that is not."""
    return training and not part.training


def hooked(module: nn.Module) -> str:
    """The name of a parameter with a hook on its gradient, if there is one."""
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return name
    return ""


class Watched(nn.Module):
    """A module that says when it changes a buffer or draws random numbers.

    Attributes:
        changes_input: it computes in the place of its input, which is another layer's, and so is
            given a copy.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.name = name
        self.module = module
        self.changes_input = any(getattr(part, "inplace", False) for part in module.modules())
        self.verdict = Verdict()

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> Tensors:
        """The module's outputs by name (:mod:`mpitrain.fields`).

        Raises:
            ImpureModule: as the class says; the generator is as it was before.
        """
        states = [(generator, generator.get_state()) for generator in _generators()]
        before = [(b, b._version) for b in self.module.buffers()]
        y = self.module(*args, **kwargs)
        drawn_from = [one for one in states if not torch.equal(one[1], one[0].get_state())]
        for generator, state in drawn_from:
            generator.set_state(state)
        if drawn_from:
            self.verdict.say(
                ImpureModule(
                    f"{self.name} draws random numbers in its forward pass, which would differ "
                    f"from layout to layout; do without dropout, {_ELSEWHERE}"
                )
            )
        after = dict(self.module.named_buffers())
        for (buffer, version), (inner, found) in zip(before, after.items()):
            if found is not buffer or found._version != version:
                self.verdict.say(_changes(self.name, inner))
        if len(after) != len(before):
            self.verdict.say(_changes(self.name, "a new one"))
        outputs: Tensors = named(y)
        for part in outputs.values():
            if not isinstance(part, torch.Tensor):
                raise ImpureModule(
                    f"{self.name} returns a {type(part).__name__}; a layer returns a tensor, or a "
                    "tuple or dictionary of tensors"
                )
        return outputs


def _generators() -> list[torch.Generator]:
    """What torch draws from: the CPU's, and that of the GPU in use."""
    if not torch.cuda.is_initialized():
        return [torch.default_generator]
    return [torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]]


def expect_the_same_trained(watched: Watched, module: nn.Module, names: Collection[str]) -> None:
    """``names`` are what the trainer trains, whatever the program has done to its module since."""
    now = {name for name, p in module.named_parameters() if p.requires_grad}
    if changed := sorted(now ^ set(names)):
        watched.verdict.say(
            ImpureModule(
                f"{watched.name}: {', '.join(changed[:3])} was frozen or unfrozen after the "
                "trainer was made, which has had the module's parameters since then; freeze "
                "before, and for another choice make another trainer"
            )
        )


def expect_given_values(
    name: str,
    modules: Sequence[nn.Module],
    run: Run,
    x: Sequence[torch.Tensor],
    own: Sequence[torch.Tensor],
) -> None:
    """Refuse a module that uses other values than those that it is given.

    Its results and gradients must stay as they are when the values that its parameters have
    themselves become NaN: in a function that holds on to a module, or goes forward once more
    within the backward pass, they would be the ones of the beginning for ever.

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
        raise ImpureModule(f"{name} cannot go backward: {' '.join(str(error).split())}") from error
    if not _alike({k: v.detach() for k, v in usual.items()}, poisoned):
        raise ImpureModule(
            f"{name} uses values of parameters that it is not given: in a function that holds on "
            "to a module, or by torch.utils.checkpoint, for which there is parallel.recompute; "
            f"call modules as attributes of their module, {_ELSEWHERE}"
        )


@contextmanager
def _poisoned(modules: Sequence[nn.Module]) -> Iterator[None]:
    """The parameters' own values are NaN meanwhile, for all that looks at their memory.

    Frozen ones may lie in a file that nobody can write, and are replaced.
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
def examine(
    watched: Watched,
    run: Run,
    buffers: Tensors,
    x: Sequence[torch.Tensor],
) -> None:
    """Run a module some times more and refuse it if the results are not those of a function.

    It goes forward twice in training mode, once in evaluation mode, and on the first sample alone.
    What this cannot see: what happens for other inputs or in later steps only, and randomness that
    does not come from torch's generator and happens to repeat.

    Args:
        watched: in whose name errors speak.
        run: goes forward.
        buffers: those that it goes forward with.
        x: a batch of at least one sample, as many tensors as the module takes.

    Raises:
        ImpureModule: with what to do instead.
    """
    name, values = watched.name, {inner: b.clone() for inner, b in buffers.items()}
    with _modes_kept(watched.module):
        watched.module.train()
        given = _copy(x)
        versions = [part._version for part in given]
        first, second = run(*given), run(*_copy(x))
        if versions != [part._version for part in given] or not all(map(_close, given, x)):
            watched.changes_input = True
            if len(x) > 1:
                raise ImpureModule(
                    f"{name} changes one of its inputs, of which others may be views: inplace=False"
                )
        for inner, before in values.items():
            if not torch.equal(before, buffers[inner]):
                raise _changes(name, inner)
        if not _alike(first, second):
            raise ImpureModule(
                f"{name} gives two results for one input in training: it draws random numbers, or "
                f"keeps state that is no parameter; do without, {_ELSEWHERE}"
            )
        watched.module.eval()
        if not _alike(first, run(*_copy(x))):
            raise ImpureModule(
                f"{name} gives other results in evaluation than in training mode, and the trainer "
                f"knows one mode only; make its forward pass independent of .training, {_ELSEWHERE}"
            )
    if len(x[0]) > 1 and not _keeps_samples_apart(run, x):
        raise ImpureModule(
            f"{name} gives a sample another result, or none, when it is alone in its batch, so "
            "that training would depend on the layout of the ranks; keep samples apart, "
            f"{_ELSEWHERE}"
        )


def _keeps_samples_apart(run: Run, x: Sequence[torch.Tensor]) -> bool:
    whole = run(*_copy(x))
    try:
        alone = run(*(part[:1].clone() for part in x))
        return all(len(part) == len(x[0]) for part in whole.values()) and _alike(
            {name: part[:1] for name, part in whole.items()}, alone
        )
    except (RuntimeError, ValueError, TypeError):  # as of a number, which has no first
        return False


def _copy(x: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [part.clone() for part in x]


def _alike(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(_close(one[name], other[name]) for name in one)


def _changes(name: str, inner: str) -> ImpureModule:
    return ImpureModule(
        f"{name} changes its buffer {inner} in its forward pass, and the trainer neither averages "
        f"nor saves that; keep buffers constant, {_ELSEWHERE}"
    )


class _modes_kept:
    """Each module is in its own mode again at the end."""

    def __init__(self, module: nn.Module) -> None:
        self._modes = [(part, part.training) for part in module.modules()]

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        for part, mode in self._modes:
            part.training = mode


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Up to rounding, for which half of the digits are left."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point() or not a.numel():
        return torch.equal(a, b)
    most = b.abs().nan_to_num().max().item()
    return torch.allclose(a, b, rtol=0, atol=torch.finfo(a.dtype).eps ** 0.5 * most, equal_nan=True)
