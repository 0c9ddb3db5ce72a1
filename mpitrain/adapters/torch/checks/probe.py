"""Parts that the checks share: samples, calls and comparisons."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from mpitrain.fields import as_given

Tensors = Mapping[str, torch.Tensor]
#: ``f(outputs, labels)``, as torch's functional losses: tensors, or tuples or dictionaries of them,
#: as the module and the data set give them.
Function = Callable[[Any, Any], Any]
#: Errors of functions that do not fit their arguments.
MISFITS = (RuntimeError, ValueError, TypeError, IndexError)
#: Types of numbers, least precise first.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def is_due(calls: int) -> bool:
    """Whether the latest of ``calls`` is checked: the first, second, fourth, eighth one."""
    return calls & (calls - 1) == 0


def one_line(error: object) -> str:
    """The text of an error without line breaks."""
    return " ".join(str(error).split())


def value(function: Function, outputs: Tensors, labels: Tensors) -> float:
    """The result of a function for some samples."""
    return float(function(as_given(outputs), as_given(labels)))


def rows(parts: Tensors, row: int) -> dict[str, torch.Tensor]:
    """The sample of this number, as a batch."""
    return {name: part.detach()[row : row + 1] for name, part in parts.items()}


def length(parts: Tensors) -> int:
    """Number of samples."""
    return len(next(iter(parts.values())))


def beside(parts: Tensors, one: Tensors, count: int = 1) -> dict[str, torch.Tensor]:
    """Samples, and after them ``count`` copies of another."""
    return {n: torch.cat([p, one[n].expand(count, *p.shape[1:])]) for n, p in parts.items()}


def alike(one: Tensors, other: Tensors) -> bool:
    """Whether the tensors are equal up to rounding, which leaves half of the digits."""
    return one.keys() == other.keys() and all(close(one[name], other[name]) for name in one)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal up to rounding, which leaves half of the digits."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point() or not a.numel():
        return torch.equal(a, b)
    most = b.abs().nan_to_num().max().item()
    return torch.allclose(a, b, rtol=0, atol=torch.finfo(a.dtype).eps ** 0.5 * most, equal_nan=True)
