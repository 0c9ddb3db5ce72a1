"""A loss that a module computes itself, as a sum and what counts in it."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from math import isclose
from typing import Any

import torch
from torch.nn import functional as F

from mpitrain.adapters.torch.checks.leaves import is_leaf, operations
from mpitrain.adapters.torch.checks.probe import Form, outputs_of
from mpitrain.adapters.torch.functions.reductions import CountedMean, Reductions
from mpitrain.fields import as_given

#: Outputs of a layer in whose first rows are a sum and what counts in it, and 0 in all others.
LOSS, COUNT = "loss", "loss_count"
_CURE = (
    "; give loss=function of outputs and labels that returns (sum, count), and the module no labels"
)


class OwnLoss:
    """Calls a module, and learns what its own loss is a mean over.

    The loss is a mean by one of torch's own losses, or a weighted sum of several whose counts have
    a constant proportion, such as twice the number of samples.  Weights, and terms besides the
    means, may follow from parameters: they are the same in all micro-batches of a step then.  Any
    other loss stays as it is.

    Attributes:
        step: the step of the pass; None: it is one of a test.
        form: makes the latest outputs as the module gave them of these by name.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        """``say`` takes a fault, a text that follows the module's name."""
        self._say = say
        self.form: Form = as_given
        self._is_there = True
        self._used: list[int] = []
        self.step: int | None = None
        self._weights: tuple[int, list[float]] | None = None
        self._proportions: list[float] = []

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
        """The module's outputs by name, with :data:`LOSS` and :data:`COUNT` for each sample."""
        losses = Reductions(within=True)
        with losses if self._is_there else nullcontext():
            outputs, self.form = outputs_of(module(*args, **kwargs))
        means, loss = losses.means, outputs.get(LOSS)
        self._is_there = self._is_there and isinstance(loss, torch.Tensor) and not loss.dim()
        if not self._is_there or not means:
            return outputs
        assert isinstance(loss, torch.Tensor)
        if loss.requires_grad:
            self._use(loss, means)
        used = [means[n] for n in self._used if n < len(means)]
        self._compare([float(mean.over) for mean in used])
        used = used or means  # before the first pass with gradients, shapes alone are asked
        rows = len(next(one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)))
        own = {LOSS: loss * used[0].over, COUNT: used[0].over}
        return outputs | {
            name: F.pad(one.to(loss.dtype).reshape(1), (0, rows - 1)) for name, one in own.items()
        }

    def _use(self, loss: torch.Tensor, means: Sequence[CountedMean]) -> None:
        """Find the means that are in the loss, and check that it is a weighted sum of them."""
        known = [n for n, mean in enumerate(means) if mean.value.requires_grad]
        total, self._used, weights = torch.zeros_like(loss), [], list[float]()
        for n in known:
            value = means[n].value
            (weight,) = torch.autograd.grad(loss, value, retain_graph=True, allow_unused=True)
            if weight is not None:
                self._used.append(n)
                weights.append(float(weight))
                total += weight * value.detach()
        if not loss.isfinite():
            return
        values = [means[n].value for n in known]
        beside, rest = operations([loss], values), float((loss - total).detach())
        inner = [node for node in beside if not is_leaf(node)]
        # Weights or terms may follow from parameters, but not from what the means follow from.
        learns = len(inner) < len(beside) and set(operations(values)).isdisjoint(inner)
        if not (learns or torch.isclose(total, loss, rtol=1e-4)):
            self._say(
                " adds other things to its loss than means by torch's own losses and what follows "
                f"from parameters alone, so that nobody knows what it is a mean over{_CURE}"
            )
        step, now = self.step if learns else -1, [*weights, rest * learns]
        if step is None:
            return
        if self._weights is None or self._weights[0] != step:
            self._weights = step, now
        before, eps = self._weights[1], torch.finfo(loss.dtype).eps ** 0.5
        same = partial(isclose, rel_tol=eps, abs_tol=eps * abs(rest))
        if len(now) != len(before) or not all(map(same, now, before)):
            self._say(
                f" weighs the means in its loss, and adds to them, by {now} for some samples and "
                f"by {before} for others{_CURE}"
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
                f"than for others, which is no mean over all{_CURE}"
            )
