"""Losses and metrics that are functions of torch tensors."""

import warnings
from collections.abc import Callable, Mapping
from math import isclose, isfinite
from typing import Any

import numpy as np
import torch

from mpitrain.adapters.torch.arrays import Moved, as_array, as_tensors, moved, on_stream_of
from mpitrain.adapters.torch.purity import is_due
from mpitrain.arrays import Array, Scalar, Shape, array_namespace
from mpitrain.config import ConfigError
from mpitrain.fields import as_given, fields, joined, named, partial, zeros

#: ``f(outputs, labels)``, as torch's functional losses: tensors, or tuples or dictionaries of them,
#: as the module and the data set give them.
Function = Callable[[Any, Any], Any]


class Following:
    """A function of outputs and labels, called where these lie.

    What a module keeps, as the weights of classes, goes to a GPU once, and again when it has
    changed; other functions see to it themselves, as by ``weights.to(outputs.device)``.
    """

    def __init__(self, function: Function) -> None:
        self.__name__ = name_of(function)
        self._function = function
        self._moved: Moved = {}

    def __call__(self, outputs: Any, labels: Any) -> Any:
        if not isinstance(self._function, torch.nn.Module):
            return self._function(outputs, labels)
        device = next(iter(named(outputs).values())).device
        kept = [*self._function.named_buffers(), *self._function.named_parameters()]
        if all(tensor.device == device for _, tensor in kept):
            return self._function(outputs, labels)
        there = {name: moved(self._moved, name, tensor, device) for name, tensor in kept}
        return torch.func.functional_call(self._function, there, (outputs, labels))


class TorchLoss:
    """A function whose result is the mean over the samples that it is given, as torch's are.

    Its mean over a micro-batch counts with that one's part of the global batch, so that the sum
    over micro-batches and ranks is the mean over the batch.  That needs equal weights: a function
    that leaves labels out (``ignore_index``) or weighs them is a mean over other things, which is
    an error as soon as the first samples show it.  Outputs in 16 bits are cast to float32 before,
    as under ``torch.autocast``.
    """

    def __init__(self, function: Function) -> None:
        """``ConfigError``: it has parameters of its own, which nobody would train."""
        own = function.parameters() if isinstance(function, torch.nn.Module) else ()
        if any(parameter.requires_grad for parameter in own):
            raise ConfigError(
                f"loss: {name_of(function)} has parameters of its own, which nobody would train; "
                "put them into the model"
            )
        self.function = function
        self._there = Following(function)
        self._unused: frozenset[str] = frozenset()
        self._means = Means(self._there, "loss")

    def __call__(self, outputs: Array, labels: Array, divisor: float) -> tuple[Scalar, Array]:
        """As :class:`mpitrain.objective.Loss` says."""
        if not labels.size:
            return 0.0, partial(array_namespace(outputs).zeros_like(outputs), self._unused)
        with on_stream_of(outputs):
            return self._of(outputs, labels, divisor)

    def _of(self, outputs: Array, labels: Array, divisor: float) -> tuple[Scalar, Array]:
        xp = array_namespace(outputs)
        parts = _needing_gradients(_tensors(outputs))
        truth = _tensors(labels)
        mean = self._there(as_given(_wide(parts)), as_given(truth))
        self._means.compare(_wide(parts), truth)
        weight = labels.size / divisor
        used = {name: one * weight for name, one in _gradients(mean, parts).items()}
        gradients = {name: used.get(name, torch.zeros_like(part)) for name, part in parts.items()}
        whole = joined({name: as_array(gradient, xp) for name, gradient in gradients.items()})
        self._unused = frozenset(gradients.keys() - used.keys())
        of_all = mean.detach().double() * weight
        return of_all.item() if xp is np else as_array(of_all, xp), partial(whole, self._unused)

    @property
    def fault(self) -> ValueError | None:
        """What its first samples have shown."""
        return self._means.fault

    def expect(self, outputs: Shape, labels: Shape, kind: Any) -> None:
        """Tries it on two drawn samples, together and one by one."""
        refused: Exception | None = None
        for wide in (torch.float32, torch.float64):  # it may hold weights of one of them
            given = _drawn(zeros(2, outputs, np.float32), wide, 1)
            wanted = _drawn(zeros(2, labels, kind), wide, 2)
            try:
                with warnings.catch_warnings():  # as of shapes that are made to fit
                    warnings.simplefilter("error", UserWarning)
                    (parts, found), *alone = (
                        self._tried(given, wanted, rows)
                        for rows in (slice(2), slice(1), slice(1, 2))
                    )
                break
            except (RuntimeError, ValueError, TypeError, IndexError, UserWarning) as error:
                refused = refused or error
        else:
            raise ValueError(
                f"{name_of(self.function)} cannot compare outputs of shape {outputs!r} with labels "
                f"of {labels}: {' '.join(str(refused).split())}"
            ) from refused
        if not isinstance(found, torch.Tensor) or found.dim() or not found.requires_grad:
            raise ValueError(
                f"{name_of(self.function)} gives {_shown(found)}; a loss is one number that "
                "follows from the outputs: its mean over the samples"
            )
        # A rank may get no samples in the first batch, and must know then, too.
        self._unused = frozenset(parts.keys() - _gradients(found, parts).keys())
        both, mean = found.item(), sum(one.item() for _, one in alone) / 2
        if not isclose(both, mean, rel_tol=1e-3, abs_tol=1e-5) and isfinite(both - mean):
            raise ValueError(
                f"{name_of(self.function)} of two samples is {both:.6g}, and the mean over them "
                f"{mean:.6g}; only a mean over samples with equal weights is the same in every "
                "layout of ranks"
            )

    def _tried(
        self, outputs: dict[str, torch.Tensor], labels: dict[str, torch.Tensor], rows: slice
    ) -> tuple[dict[str, torch.Tensor], Any]:
        """The outputs of these rows, and the loss of them."""
        parts = _needing_gradients({name: part[rows].clone() for name, part in outputs.items()})
        truth = {name: part[rows] for name, part in labels.items()}
        return parts, self.function(as_given(parts), as_given(truth))


class Means:
    """Whether a function of samples is a mean over them, seen by a few of them one by one.

    Attributes:
        fault: why it is none.
    """

    #: How many are looked at: the more there are, the closer to their mean other functions come.
    MOST = 8

    def __init__(self, function: Function, what: str) -> None:
        self._function, self._what = function, what
        self._calls = 0
        self.fault: ValueError | None = None

    @torch.no_grad()
    def compare(self, outputs: dict[str, torch.Tensor], labels: dict[str, torch.Tensor]) -> None:
        """Looks at the first samples of a call: of the first, second, fourth, eighth one and so on
        that has two samples or more."""
        count = min(len(next(iter(labels.values()))), self.MOST)
        if count < 2:
            return
        self._calls += 1
        if self.fault or not is_due(self._calls):
            return

        def of(rows: slice) -> float:
            some = ({n: part[rows] for n, part in parts.items()} for parts in (outputs, labels))
            return float(self._function(*map(as_given, some)))

        try:
            found, mean = of(slice(count)), sum(of(slice(k, k + 1)) for k in range(count)) / count
        except (RuntimeError, ValueError, TypeError, IndexError):
            return  # it takes no single samples, and says so where it is given one
        if isfinite(found) and not isclose(found, mean, rel_tol=1e-3, abs_tol=1e-5):
            self.fault = ConfigError(
                f"{self._what}: {name_of(self._function)} of {count} samples is {found:.6g}, and "
                f"the mean over them {mean:.6g}; it must be a mean over samples with equal weights "
                "(labels that it leaves out count, too), or else it is another one in every layout"
            )


class TorchMetric:
    """A function that gives the mean over the samples that it is given, or ``(sum, count)``."""

    def __init__(self, function: Function, name: str = "one of them") -> None:
        self.function = function
        self._there = Following(function)
        self._means = Means(self._there, f"metrics: {name}")

    @property
    def fault(self) -> ValueError | None:
        """What its first samples have shown."""
        return self._means.fault

    def add(self, outputs: Array, labels: Array) -> Array:
        if not len(labels):
            return np.zeros(2)
        scores, truth = _wide(_tensors(outputs)), _tensors(labels)
        with torch.no_grad(), on_stream_of(outputs):
            found = self._there(as_given(scores), as_given(truth))
        if isinstance(found, tuple):
            total, count = map(float, found)
            return np.array([total, count])
        self._means.compare(scores, truth)
        return np.array([float(found) * len(labels), len(labels)])

    def value(self, totals: Array) -> float:
        return float(totals[0] / totals[1])


def _tensors(array: Array) -> dict[str, torch.Tensor]:
    return as_tensors(fields(array))


def _wide(parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """In float32 what has 16 bits."""
    narrow = (torch.bfloat16, torch.float16)
    return {n: part.float() if part.dtype in narrow else part for n, part in parts.items()}


def _drawn(arrays: Mapping[str, Array], wide: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Two samples: numbers between 0 and 1, or whole ones, 0 and 1, as of two classes."""
    draw = torch.Generator().manual_seed(seed)
    found = {}
    for name, part in as_tensors(arrays).items():
        if part.is_floating_point():
            found[name] = torch.rand(part.shape, generator=draw, dtype=wide)
        else:
            found[name] = part + torch.arange(2).reshape(2, *[1] * (part.dim() - 1)).to(part.dtype)
    return found


def _needing_gradients(parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: part.requires_grad_(part.is_floating_point()) for name, part in parts.items()}


def _gradients(mean: torch.Tensor, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of a loss, by those of the outputs that it follows from."""
    by = {name: part for name, part in parts.items() if part.requires_grad}
    found = torch.autograd.grad(mean, list(by.values()), allow_unused=True)
    return {name: one for name, one in zip(by, found, strict=True) if one is not None}


def name_of(function: Any) -> str:
    """For errors."""
    return getattr(function, "__name__", type(function).__name__)


def _shown(found: Any) -> str:
    if not isinstance(found, torch.Tensor):
        return f"a {type(found).__name__}"
    if found.dim():
        return f"a tensor of shape {tuple(found.shape)}"
    return "a number without a gradient"
