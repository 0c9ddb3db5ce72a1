"""Losses and metrics that are functions of torch tensors."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mpitrain.adapters.torch.arrays import as_array, as_tensor
from mpitrain.arrays import Array, Shape

#: ``f(outputs, labels)``, as torch's functional losses.
Function = Callable[[torch.Tensor, torch.Tensor], Any]


class TorchLoss:
    """A function whose result is the mean over the samples that it is given, as torch's are.

    Its mean over a micro-batch counts with that one's part of the global batch, so that the sum
    over micro-batches and ranks is the mean over the batch.  That needs equal weights: a function
    that leaves labels out (``ignore_index``) or weighs them is a mean over other things.
    """

    def __init__(self, function: Function) -> None:
        self.function = function

    def __call__(self, outputs: Array, labels: Array, divisor: float) -> tuple[float, Array]:
        """As :class:`mpitrain.objective.Loss` says."""
        if not labels.size:
            return 0.0, np.zeros_like(outputs)
        given = as_tensor(np.ascontiguousarray(outputs)).requires_grad_()
        mean = self.function(given, as_tensor(np.ascontiguousarray(labels)))
        weight = labels.size / divisor
        (gradient,) = torch.autograd.grad(mean, given)
        return mean.item() * weight, as_array(gradient * weight)

    def expect(self, outputs: Shape, labels: Shape, kind: Any) -> None:
        """Tries it on two samples of zeros."""
        given = torch.zeros((2, *outputs), dtype=torch.get_default_dtype(), requires_grad=True)
        wanted = as_tensor(np.zeros((2, *labels), kind))
        wanted = wanted.to(given.dtype) if wanted.is_floating_point() else wanted
        try:
            with warnings.catch_warnings():  # as of shapes that are made to fit
                warnings.simplefilter("error", UserWarning)
                found = self.function(given, wanted)
        except (RuntimeError, ValueError, TypeError, IndexError, UserWarning) as error:
            raise ValueError(
                f"{name_of(self.function)} cannot compare outputs of shape {outputs} with labels "
                f"of {labels}: {' '.join(str(error).split())}"
            ) from error
        if not isinstance(found, torch.Tensor) or found.dim() or not found.requires_grad:
            raise ValueError(
                f"{name_of(self.function)} gives {_shown(found)}; a loss is one number that "
                "follows from the outputs: its mean over the samples"
            )


class TorchMetric:
    """A function that gives the mean over the samples that it is given, or ``(sum, count)``."""

    def __init__(self, function: Function) -> None:
        self.function = function

    def add(self, outputs: Array, labels: Array) -> Array:
        if not len(labels):
            return np.zeros(2)
        with torch.no_grad():
            pair = (as_tensor(np.ascontiguousarray(a)) for a in (outputs, labels))
            found = self.function(*pair)
        if isinstance(found, tuple):
            total, count = map(float, found)
            return np.array([total, count])
        return np.array([float(found) * len(labels), len(labels)])

    def value(self, totals: Array) -> float:
        return float(totals[0] / totals[1])


def name_of(function: Any) -> str:
    """For errors."""
    return getattr(function, "__name__", type(function).__name__)


def _shown(found: Any) -> str:
    if not isinstance(found, torch.Tensor):
        return f"a {type(found).__name__}"
    if found.dim():
        return f"a tensor of shape {tuple(found.shape)}"
    return "a number without a gradient"
