"""A loss that a module computes itself, as a sum and what counts in it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isclose
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mpitrain.adapters.torch.checks.probe import outputs_of
from mpitrain.adapters.torch.functions.reductions import OVER_WEIGHTS, whole

#: Outputs of a layer in whose first rows are a sum and what counts in it, and 0 in all others.
LOSS, COUNT = "loss", "loss_count"
#: Losses of classes, and of numbers one by one, all of which count.
_OF_CLASSES = (F.cross_entropy, F.nll_loss)
_OF_NUMBERS = (
    F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.huber_loss, F.l1_loss,
    F.mse_loss, F.smooth_l1_loss,
)  # fmt: skip


class OwnLoss:
    """Calls a module, and learns what its own loss is a mean over.

    The loss is a mean by one of torch's own losses, or a weighted sum of several whose counts have
    a constant proportion, such as twice the number of samples; any other loss stays as it is.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        """``say`` takes a fault, a text that follows the module's name."""
        self._say = say
        self._is_there = True
        self._used: list[int] = []
        self._proportions: list[float] = []

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
        """The module's outputs by name, with :data:`LOSS` and :data:`COUNT` for each sample."""
        if not self._is_there:
            return outputs_of(module(*args, **kwargs))
        with _NotedMeans() as means:
            outputs = outputs_of(module(*args, **kwargs))
        loss = outputs.get(LOSS)
        self._is_there = isinstance(loss, torch.Tensor) and not loss.dim()
        if not self._is_there or not means.found:
            return outputs
        assert isinstance(loss, torch.Tensor)
        if loss.requires_grad:
            self._use(loss, means.found)
        used = [means.found[n] for n in self._used if n < len(means.found)]
        self._compare([float(mean.count) for mean in used])
        used = used or means.found  # before the first pass with gradients, shapes alone are asked
        rows = len(next(one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)))
        own = {LOSS: loss * used[0].count, COUNT: used[0].count}
        return outputs | {
            name: F.pad(one.to(loss.dtype).reshape(1), (0, rows - 1)) for name, one in own.items()
        }

    def _use(self, loss: torch.Tensor, means: Sequence["_NotedMean"]) -> None:
        """Find the means that are in the loss, and check that it is a weighted sum of them."""
        known = [n for n, mean in enumerate(means) if mean.value.requires_grad]
        total, self._used = torch.zeros_like(loss), []
        for n in known:
            value = means[n].value
            (weight,) = torch.autograd.grad(loss, value, retain_graph=True, allow_unused=True)
            if weight is not None:
                self._used.append(n)
                total += weight * value.detach()
        if not torch.isclose(total, loss, rtol=1e-4):
            self._say(
                " adds other things to its loss than means by torch's own losses, so that nobody "
                "knows what it is a mean over; give loss=function of outputs and labels that "
                "returns (sum, count), and the module no labels"
            )

    def _compare(self, counts: Sequence[float]) -> None:
        """Check that the counts have the proportions that they always have."""
        if not any(counts):  # nothing counts, or it is unknown yet which means are in the loss
            return
        found = [count / sum(counts) for count in counts]
        self._proportions = self._proportions or found
        same = len(found) == len(self._proportions) and all(map(isclose, found, self._proportions))
        if not same or not all(counts):
            self._say(
                " has a loss of several means, over other parts of what counts for some samples "
                "than for others, which is no mean over all; give loss=function of outputs and "
                "labels that returns (sum, count), and the module no labels"
            )


@dataclass(frozen=True)
class _NotedMean:
    """A mean, and what counts in it."""

    value: torch.Tensor
    count: torch.Tensor


class _NotedMeans(TorchFunctionMode):
    """Notes means by torch's own losses; a mean over nothing is 0, and not NaN.

    Attributes:
        found: the means.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[_NotedMean] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = whole(function, kwargs)
        if given.get("reduction", "") != "mean" or function not in (*_OF_CLASSES, *_OF_NUMBERS):
            return function(*args, **given)
        scores, labels, *_ = args
        each = function(*args, **given | {"reduction": "none"})
        if scores.dtype in (torch.float16, torch.bfloat16):  # sums of 16 bits would overflow
            each = each.float()
        if function in OVER_WEIGHTS and given.get("weight") is not None:
            count = given["weight"].sum()
        elif function in _OF_NUMBERS:
            count = torch.tensor(float(each.numel()), device=each.device)
        elif labels.is_floating_point():  # probabilities of all classes
            count = torch.tensor(float(len(labels)), device=each.device)
        else:
            counts, weight = labels != given["ignore_index"], given.get("weight")
            count = counts.sum() if weight is None else weight[labels[counts]].sum()
        count = count.to(each.dtype)
        mean = each.sum() / torch.where(count > 0, count, 1)
        self.found.append(_NotedMean(mean, count))
        return mean.clone()  # which the module may change in place
