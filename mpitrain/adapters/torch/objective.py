"""Losses and metrics that are functions of torch tensors."""

import warnings
from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
import torch

from mpitrain.adapters.torch.arrays import Moved, as_array, as_tensors, moved, on_stream_of
from mpitrain.adapters.torch.checks.means import LossGradients, LossMeans, MetricMeans, gradients
from mpitrain.adapters.torch.checks.probe import MISFITS, Function, one_line
from mpitrain.arrays import Array, Scalar, Shape, array_namespace
from mpitrain.config import ConfigError
from mpitrain.fields import as_given, fields, joined, named, partial, zeros


class Following:
    """A function of outputs and labels, called on their device.

    Tensors of a module, such as weights of classes, are copied to a GPU once, and again when they
    have changed; other functions do that themselves, as by ``weights.to(outputs.device)``.
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
    """A function whose result is the mean over its samples, as torch's are.

    The mean over a micro-batch is weighted by its part of the global batch, so that the sum over
    micro-batches and ranks is the mean over the batch.  Samples must have equal weights: a function
    that leaves labels out (``ignore_index``) or weighs them is an error in the first step in which
    it matters (:class:`mpitrain.adapters.torch.checks.means.LossMeans`).  Outputs in 16 bits are
    cast to float32 before, as under ``torch.autocast``.
    """

    def __init__(self, function: Function) -> None:
        """``ConfigError``: the function has parameters, which nobody would train."""
        own = function.parameters() if isinstance(function, torch.nn.Module) else ()
        if any(parameter.requires_grad for parameter in own):
            raise ConfigError(
                f"loss: {name_of(function)} has parameters of its own, which nobody would train; "
                "put them into the model"
            )
        self.function = function
        self._there = Following(function)
        self._unused: frozenset[str] = frozenset()
        self._casts = False
        self._means = LossMeans(self._there, name_of(function))

    def __call__(self, outputs: Array, labels: Array, divisor: float) -> tuple[Scalar, Array]:
        """See :class:`mpitrain.objective.LossFunction`."""
        if not labels.size:
            return 0.0, partial(array_namespace(outputs).zeros_like(outputs), self._unused)
        with on_stream_of(outputs):
            return self._of(outputs, labels, divisor)

    def _of(self, outputs: Array, labels: Array, divisor: float) -> tuple[Scalar, Array]:
        xp = array_namespace(outputs)
        parts = as_tensors(fields(outputs))
        wide = _needing_gradients(_wide(parts))
        truth = self._cast(as_tensors(fields(labels)), wide)
        versions = [part._version for part in truth.values()]
        mean = self._there(as_given(wide), as_given(truth))
        by = gradients(mean, wide)
        if versions == [part._version for part in truth.values()]:
            self._means.compare(wide, truth, LossGradients(mean.item(), by))
        else:
            self._means.fault = ConfigError(
                f"loss: {name_of(self.function)} changes its labels in place, which are the data's "
                "own; let it work on labels.clone()"
            )
        weight = labels.size / divisor
        used = {name: (one * weight).to(parts[name].dtype) for name, one in by.items()}
        found = {name: used.get(name, torch.zeros_like(part)) for name, part in parts.items()}
        whole = joined({name: as_array(gradient, xp) for name, gradient in found.items()})
        self._unused = frozenset(found.keys() - used.keys())
        of_all = mean.detach().double() * weight
        return of_all.item() if xp is np else as_array(of_all, xp), partial(whole, self._unused)

    @property
    def fault(self) -> ValueError | None:
        """The first fault that samples have shown."""
        return self._means.fault

    def expect(self, outputs: Shape, labels: Shape, kind: Any) -> None:
        """Try the loss on drawn samples: two together and one by one, then many classes."""
        refused: Exception | None = None
        kinds = (torch.float32, torch.float64)  # the function may hold weights of either type
        for wide, self._casts in product(kinds, (False, True)):
            given = _drawn(zeros(2, outputs, np.float32), wide, 1)
            wanted = self._cast(_drawn(zeros(2, labels, kind), wide, 2), given)
            try:
                with warnings.catch_warnings():  # torch warns of shapes that are broadcast
                    warnings.simplefilter("error", UserWarning)
                    (parts, found), *_ = [
                        self._tried(given, wanted, some)
                        for some in (slice(2), slice(1), slice(1, 2))
                    ]
                    is_loss = (
                        isinstance(found, torch.Tensor) and not found.dim() and found.requires_grad
                    )
                    by = gradients(found, parts) if is_loss else {}
                break
            except (*MISFITS, UserWarning) as error:
                refused = refused or error
        else:
            if "in-place" in str(refused):
                raise ValueError(
                    f"{name_of(self.function)} changes its outputs in place; let it work on "
                    "outputs.clone()"
                ) from refused
            raise ValueError(
                f"{name_of(self.function)} cannot compare outputs of shape {outputs!r} with labels "
                f"of {labels}: {one_line(refused)}"
            ) from refused
        if not is_loss:
            raise ValueError(
                f"{name_of(self.function)} gives {_shown(found)}; a loss is one number that "
                "follows from the outputs: its mean over the samples"
            )
        # A rank may have no samples in the first batch, and must know the unused fields then, too.
        self._unused = frozenset(parts.keys() - by.keys())
        self._means.label = {name: part[:1] for name, part in wanted.items()}
        self._expect_mean(given, wanted)
        self._try_labels(outputs, labels, kind, next(iter(given.values())).dtype)

    def _try_labels(self, outputs: Shape, labels: Shape, kind: Any, wide: torch.dtype) -> None:
        """Try many samples, with labels of all classes, or numbers of which some are 0."""
        one = zeros(1, outputs, np.float32)
        count = max(2, min(256, 2**18 // sum(part.size for part in one.values())))
        given = _drawn(zeros(count, outputs, np.float32), wide, 3)
        sizes = {size for part in one.values() for size in part.shape[1:]}
        for classes in sorted(sizes, reverse=True):
            wanted = _of_classes(_drawn(zeros(count, labels, kind), wide, 4), classes)
            wanted = self._cast(wanted, given)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    self._there(as_given(given), as_given(wanted))
            except MISFITS:  # there are fewer classes, or labels are no classes
                continue
            self._expect_mean(given, wanted)
            return

    def _expect_mean(self, given: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        self._means.compare(given, wanted, self._means.gradients(given, wanted))
        if self._means.fault is not None:
            raise ValueError(str(self._means.fault).removeprefix("loss: "))

    def _cast(
        self, labels: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Labels that are integers or bools, in the type of the outputs, if these are cast."""
        if not self._casts or "" not in labels or labels[""].is_floating_point():
            return labels
        return {"": labels[""].to(next(iter(outputs.values())).dtype)}

    def _tried(
        self, outputs: dict[str, torch.Tensor], labels: dict[str, torch.Tensor], some: slice
    ) -> tuple[dict[str, torch.Tensor], Any]:
        """Outputs of these rows, and their loss."""
        parts = _needing_gradients({name: part[some].clone() for name, part in outputs.items()})
        truth = {name: part[some] for name, part in labels.items()}
        return parts, self.function(as_given(parts), as_given(truth))


class TorchMetric:
    """A function that gives the mean over its samples, or ``(sum, count)``."""

    def __init__(self, function: Function, name: str = "one of them") -> None:
        self.function = function
        self._there = Following(function)
        self._name = name
        self._means = MetricMeans(self._there, f"metrics: {name}: {name_of(function)}")

    @property
    def fault(self) -> ValueError | None:
        """The first fault that samples have shown."""
        return self._means.fault

    def add(self, outputs: Array, labels: Array) -> Array:
        if not len(labels):
            return np.zeros(2)
        scores, truth = _wide(as_tensors(fields(outputs))), as_tensors(fields(labels))
        with torch.no_grad(), on_stream_of(outputs):
            found = self._there(as_given(scores), as_given(truth))
        try:
            if isinstance(found, tuple):
                total, count = map(float, found)
                return np.array([total, count])
            total, count = float(found) * len(labels), len(labels)
        except (RuntimeError, TypeError, ValueError):
            self._means.fault = ConfigError(
                f"metrics: {self._name} gives {_shown(found)}; it must give a number, its mean "
                "over the samples, or (sum, count)"
            )
            return np.zeros(2)
        self._means.compare(scores, truth, found)
        return np.array([total, count])

    def value(self, totals: Array) -> float:
        return float(totals[0] / totals[1])


def _wide(parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of 16 bits in float32."""
    narrow = (torch.bfloat16, torch.float16)
    return {n: part.float() if part.dtype in narrow else part for n, part in parts.items()}


def _drawn(arrays: Mapping[str, Array], wide: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Samples of numbers between 0 and 1; integers are 0 and 1, as for two classes."""
    draw = torch.Generator().manual_seed(seed)
    found = {}
    for name, part in as_tensors(arrays).items():
        if part.is_floating_point():
            found[name] = torch.rand(part.shape, generator=draw, dtype=wide)
        else:
            classes = torch.arange(len(part)).reshape(-1, *[1] * (part.dim() - 1)) % 2
            found[name] = part + classes.to(part.dtype)
    return found


def _of_classes(labels: dict[str, torch.Tensor], classes: int) -> dict[str, torch.Tensor]:
    """Labels of all classes in turn; of labels that are no integers, the first are 0."""
    return {
        name: torch.cat([torch.zeros_like(part[:1]), part[1:]])
        if part.is_floating_point()
        else part
        if part.dtype == torch.bool
        else (torch.arange(part.numel()) % classes).reshape(part.shape).to(part.dtype)
        for name, part in labels.items()
    }


def _needing_gradients(parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: part.requires_grad_(part.is_floating_point()) for name, part in parts.items()}


def name_of(function: Any) -> str:
    """Name of a function in errors."""
    return getattr(function, "__name__", type(function).__name__)


def _shown(found: Any) -> str:
    if not isinstance(found, torch.Tensor):
        return f"a {type(found).__name__}"
    if found.dim():
        return f"a tensor of shape {tuple(found.shape)}"
    return "a number without a gradient"
