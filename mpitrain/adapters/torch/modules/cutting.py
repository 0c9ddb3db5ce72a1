"""Cut a module into parts that follow one another, for the stages of a pipeline.

A part is the module's own forward pass, begun late and left early.  It has the module's structure:
modules that earlier parts have called give what these sent, and behind its own last module an
exception ends the pass.  Each part computes again all that is between modules (masks, positions),
on numbers that are absent (NaN) where no result of the part follows from them.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from collectives.errors import hint
from mpitrain.adapters.torch.arrays import copied, tensors_of
from mpitrain.adapters.torch.checks.module_class import ImpureModule
from mpitrain.adapters.torch.checks.probe import Tensors, arguments, one_line, options
from mpitrain.adapters.torch.modules.trial import MANY, Crossing, Result, Trial, absent
from mpitrain.arrays import Array
from mpitrain.fields import fields

#: Modules with results in the shape of their inputs, which a part may do without.
_REPLACED = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)


def cut(module: nn.Module, after: str | Sequence[str], inputs: Array) -> list[nn.Module]:
    """Parts of a module, each of which ends behind a module of these names.

    Parameters and buffers keep their names, and are the module's own.  A part takes the results of
    the part before it: a tensor, or several by name.  Trial runs show which tensors, parameters and
    buffers each part needs; what several parts need is in all of them.

    Args:
        module: a module.
        after: names of modules within it, in the order in which they are called; see
            :func:`expanded`.
        inputs: the module's inputs for some samples, of which three are taken.

    Raises:
        ValueError: it has no such module, or cannot be cut there.
        ImpureModule: a batch norm would be in two parts.
    """
    what = f"a {type(module).__name__}"
    if has_hooks(module):
        raise ValueError(f"{what} cannot be cut, as its own hooks belong to no part of it")
    names = expanded(module, after)
    kind = next((p.dtype for p in module.parameters()), torch.get_default_dtype())
    given = tensors_of(fields(inputs[np.arange(MANY) % len(inputs)]), kind, every=True)
    try:
        trial = Trial(module, names, given)
        return [_Part(trial, number, given).module for number in range(len(names) + 1)]
    except ValueError:
        raise
    except Exception as error:  # the module's own code may raise anything
        raise ValueError(
            f"{what} cannot be tried in parts on {MANY} samples ({type(error).__name__}: "
            f"{one_line(error)}); cut elsewhere, keep no results in modules, or give a "
            "torch.nn.Sequential of parts"
        ) from error


def expanded(module: nn.Module, after: str | Sequence[str]) -> list[str]:
    """Names of modules; the name of a ``ModuleList`` stands for all modules in it.

    One name alone may stand for all modules of a ``Sequential``, too.

    Raises:
        ValueError: there is no module of a name.
    """
    known = dict(module.named_modules(remove_duplicate=False))
    lists = (nn.ModuleList, nn.Sequential) if isinstance(after, str) else (nn.ModuleList,)
    found: list[str] = []
    for name in [after] if isinstance(after, str) else after:
        if name not in known:
            near = hint(name, filter(None, known))
            raise ValueError(f"cuts: there is no module {name!r}; {near}")
        is_list = isinstance(known[name], lists)
        found += [f"{name}.{own}" for own in known[name]._modules] if is_list else [name]
    return found


def has_hooks(module: nn.Module) -> bool:
    """Whether the module as a whole has hooks for its forward or backward pass."""
    return any(_hooks(module))


def _hooks(module: nn.Module) -> tuple[dict[Any, Any], ...]:
    own = module._forward_pre_hooks, module._forward_hooks
    return *own, module._backward_pre_hooks, module._backward_hooks


class _Part:
    """The forward pass of one part, as the ``forward`` of a copy of the module's structure.

    Attributes:
        module: the part.
        fault: a fault of the latest pass, a text that follows the part's name.
    """

    fault = ""

    def __init__(self, trial: Trial, number: int, inputs: Tensors) -> None:
        whole = trial.module
        self._number = number
        arriving, self._leaving = trial.crossing[number : number + 2]
        self._arriving: dict[Crossing, str] = {one: one.field for one in arriving}
        if not number:
            self._arriving = {Crossing(name): name for name in inputs}
        self._inputs = {name: (one.shape[1:], one.dtype) for name, one in inputs.items()}
        self._options = options(whole)
        self._shapes = {one: trial.shape(one) for one in self._leaving}
        self._tried = {one: trial.shape(one).many[1:] for one in self._arriving}
        self._here: dict[Crossing, torch.Tensor] = {}
        self._rows, self._lengths = 0, dict[int, int]()
        #: Where the numbers are that others lack, and the names of parameters that this part lacks.
        self._device = torch.device("cpu")
        self._kind = next((p.dtype for p in whole.parameters()), torch.get_default_dtype())
        self._lacks: list[tuple[nn.Module, str]] = []
        values = [*whole.parameters(), *whole.buffers()]
        copies: dict[int, Any] = {id(one): one for one in values}  # these are not copied
        for part in whole.modules():
            if isinstance(part, _REPLACED) and not trial.needs(number, part):
                copies[id(part)] = nn.Identity()
        self.module = copied(whole, copies)
        foreign = {id(one) for one in values if not trial.needs(number, one)}
        for part in self.module.modules():
            for own in (part._parameters, part._buffers):
                for name, tensor in [*own.items()]:
                    if tensor is not None and id(tensor) in foreign:
                        del own[name]
                        part.__dict__[name] = absent(tensor.shape, tensor.dtype)
                        self._lacks.append((part, name))
        self._forward = self.module.forward
        self.module.forward = self
        for call in trial.left_out(number):
            part = copies[id(call.module)]
            part.forward = partial(self._result, call.end, call.result)
            for hooks in _hooks(part):
                hooks.clear()
        for call in trial.calls:
            if call.end == number:
                copies[id(call.module)].register_forward_hook(_leave)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Results of the part for those of the part before, or for the module's inputs."""
        before = self._here, self._rows, self._lengths  # a trial may come within a pass
        self.fault = ""
        values = args or [kwargs[name] for name in self._arriving.values()]
        self._here = dict(zip(self._arriving, values, strict=True))
        self._rows = len(values[0])
        kind = next((p.dtype for p in self.module.parameters()), self._kind)
        if (values[0].device, kind) != (self._device, self._kind):
            self._go_to(values[0].device, kind)
        both = [(self._tried[one], tensor.shape[1:]) for one, tensor in self._here.items()]
        pairs = {pair for shapes in both for pair in zip(*shapes, strict=True)}
        self._lengths = {there: here for there, here in pairs if there != here}
        self._doubtful = [own for own in self._lengths if sum(own == one for one, _ in pairs) > 1]
        given = {
            name: self._here.get(Crossing(name), self._absent(shape, kind))
            for name, (shape, kind) in self._inputs.items()
        }
        try:
            found = self._run(*arguments(given, self._options))
            if not self._leaving:
                return found
            leaves = tree_flatten(found.result)[0] if isinstance(found, _Left) else []
            self._here |= {Crossing(n, self._number): one for n, one in enumerate(leaves)}
            sent = {one.field: self._sent(one) for one in self._leaving}
            return sent if len(sent) > 1 else next(iter(sent.values()))
        finally:
            self._here, self._rows, self._lengths = before

    def _absent(self, shape: Sequence[int], kind: torch.dtype) -> torch.Tensor:
        """An input that this part does not have."""
        sizes = (self._lengths.get(size, size) for size in shape)
        return absent((self._rows, *sizes), kind, self._device)

    def _go_to(self, device: torch.device, kind: torch.dtype) -> None:
        """Let all that is absent be on this device and of this type, as operations mix it."""
        self._device, self._kind = device, kind
        for part, name in self._lacks:
            lacking = part.__dict__[name]
            own = kind if lacking.is_floating_point() else lacking.dtype
            part.__dict__[name] = absent(lacking.shape, own, device)

    def _result(self, end: int | None, result: Result, *args: Any, **kwargs: Any) -> Any:
        """The result of a module that earlier parts have called, or that this one does not need."""
        here = self._here.items() if end is not None else ()
        sent = {int(one.place): tensor for one, tensor in here if one.part == end}
        return result.of(self._rows, sent, self._lengths, self._device)

    def _run(self, args: Any, kwargs: Any) -> Any:
        try:
            return self._forward(*args, **kwargs)
        except _Left as left:
            return left
        except RuntimeError as error:
            if not self._doubtful:
                raise
            raise ImpureModule(
                f"samples of the trial have length {self._doubtful[0]}, which is another size of "
                "the module, too, and later ones have another length; let the first three samples "
                "have a length that nothing else has, or pad all to one"
            ) from error

    def _sent(self, one: Crossing) -> torch.Tensor:
        """A tensor for the next part with a row for each sample, also where they have one row."""
        found = self._here.get(one)
        if found is None:
            self.fault = " leaves by another way than in the trial, not behind its last module"
            shape = self._shapes[one].absent(self._rows, self._lengths, self._device)
            return torch.zeros_like(shape, dtype=self._kind if shape.is_floating_point() else None)
        return found if len(found) == self._rows else found.expand(self._rows, *found.shape[1:])


class _Left(BaseException):
    """Ends a forward pass behind a module; a model that catches errors does not catch it."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result


def _leave(part: nn.Module, given: Any, result: Any) -> NoReturn:
    raise _Left(result)
