"""How a program's function reduces its samples: a mean over all, over what counts, or a sum."""

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from math import isclose
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from mpitrain.adapters.torch.arrays import NARROW
from mpitrain.adapters.torch.checks.probe import Form, outputs_of
from mpitrain.adapters.torch.functions.lent import is_leaf, operations
from mpitrain.fields import as_given, named
from mpitrain.objective import Reduction

#: Outputs of a layer in whose first rows are a sum and what counts in it, and 0 in all others.
LOSS, COUNT = "loss", "loss_count"
_CURE = (
    "; give loss=function of outputs and labels that returns (sum, count), and the module no labels"
)
#: Losses of classes, whose means are over what counts: ``ignore_index`` and weights of classes.
_OF_CLASSES = (F.cross_entropy, F.nll_loss)
_PROPERTIES = ("requires_grad", "shape", "dtype", "device", "ndim", "is_leaf", "grad")
#: Functions that tell a tensor's shape and kind, and none of its values.
_SHAPES = (
    *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES), torch.Tensor.size,
    torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point, torch.Tensor.__len__,
)  # fmt: skip
#: Losses of numbers, whose means are over the weights of these where they are given.
_OVER_WEIGHTS = (F.mse_loss, F.l1_loss)
#: Losses of numbers one by one.
_OF_NUMBERS = (
    *_OVER_WEIGHTS, F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.huber_loss,
    F.smooth_l1_loss,
)  # fmt: skip
#: Losses whose means are over all numbers, or over all samples.
_OF_ALL = (
    *_OF_NUMBERS, F.cosine_embedding_loss, F.ctc_loss, F.gaussian_nll_loss,
    F.hinge_embedding_loss, F.kl_div, F.margin_ranking_loss, F.multi_margin_loss,
    F.multilabel_margin_loss, F.multilabel_soft_margin_loss, F.poisson_nll_loss,
    F.soft_margin_loss, F.triplet_margin_loss,
)  # fmt: skip
#: Losses that take labels of another shape; others broadcast it, perhaps across samples.
_OF_UNLIKE = (*_OF_CLASSES, F.cosine_embedding_loss, F.ctc_loss, F.multi_margin_loss)


class Reduced(NamedTuple):
    """The result of a function of samples.

    Attributes:
        total: the mean, or the sum.
        count: divisor of ``total`` that makes it the mean over what counts in the samples; None
            for other reductions.
        reduction: kind of ``total``, as :data:`mpitrain.objective.Reduction` names it.
        is_known: whether a mean is surely one over samples with equal weights, and a sum adds up,
            as those of a loss of torch over outputs and labels as they are, and of one shape.
    """

    total: Any
    count: Any = None
    reduction: Reduction = "mean"
    is_known: bool = False


class CountedMean(NamedTuple):
    """A mean by one of torch's losses, and what counts in it."""

    value: torch.Tensor
    over: torch.Tensor


class Reductions(TorchFunctionMode):
    """Follows torch's own losses, to learn what their means are over.

    Attributes:
        ignore_index: value of the labels that the last loss of classes has left out; None: there
            was none.
        means: means within a module; one over nothing is 0, and not NaN.
        weighs: whether that loss has weights of classes.
        fault: what the function may not do, a text that follows its name.
        moving: identities of tensors whose values are elsewhere.
    """

    weighs, fault, moving = False, "", frozenset[int]()

    def __init__(self, *, within: bool = False, counts: bool = False) -> None:
        """``within``: the losses are in a module, not in a function of outputs and labels;
        ``counts``: there are no outputs, and torch's own losses are not computed."""
        super().__init__()
        self.ignore_index: int | None = None
        self.means: list[CountedMean] = []
        self._within, self._counts = within, counts
        self._last: tuple[Any, int, Reduced] | None = None
        #: Shapes of outputs and labels, by identity, and None for what the function has kept.
        self._given: dict[int, Any] = {}

    def of(self, function: Callable[[Any, Any], Any], outputs: Any, labels: Any) -> Reduced:
        """The result of ``function(outputs, labels)``.

        A tuple is the sum and what counts; a number that one of torch's own losses gave, and that
        nothing has changed since, is reduced as that loss is.  Any other result should be a mean
        over samples with equal weights.
        """
        kept = getattr(function, "kept", {})
        samples = (*named(outputs).values(), *named(labels).values())
        self._given = dict.fromkeys(map(id, kept.values())) | {id(s): s.shape for s in samples}
        with self:
            found = function(outputs, labels)
        last, self._last, self._given = self._last, None, {}
        if isinstance(found, tuple) and len(found) == 2:
            return Reduced(*found, reduction="count")
        if last and last[0] is found and last[1] == found._version:
            return last[2]
        return Reduced(found)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = _whole(function, kwargs)
        if function is torch.Tensor.backward:
            self.fault = "calls backward() itself, whose gradients would be lost; return the sum"
        elif self.moving and function not in _SHAPES and self._reads_moving(args, given):
            self.fault = "reads constants that the module changes; return them as its outputs"
        if function in _OF_CLASSES:
            self.ignore_index = given.get("ignore_index", -100)
            self.weighs = given.get("weight") is not None
        elif function not in _OF_ALL:
            return function(*args, **given)
        reduction = given.get("reduction")
        count = _counted(function, *args, **given) if reduction == "mean" else None
        if self._counts and reduction in ("mean", "sum"):
            function = _absent
        elif self._within:
            if reduction == "mean" and function in (*_OF_CLASSES, *_OF_NUMBERS, F.ctc_loss):
                return self._noted(function, args, given, count)
            return function(*args, **given)
        used = (one for one in (*args, *given.values()) if isinstance(one, torch.Tensor))
        shapes = {self._given.get(id(one), "other") for one in used} - {None}
        is_known = "other" not in shapes and (function in _OF_UNLIKE or len(shapes) == 1)
        if count is None:
            found = function(*args, **given)
            how: Reduction = "sum" if reduction == "sum" else "mean"
            reduced = Reduced(found, reduction=how, is_known=is_known)
        else:
            narrow = args[0].dtype in NARROW
            each = function(*args, **given | {"reduction": "none" if narrow else "sum"})
            total = each.float().sum() if narrow else each
            found, reduced = total / count, Reduced(total, count, "count", is_known)
        self._last = found, found._version, reduced
        return found

    def _reads_moving(self, args: Any, given: Any) -> bool:
        return any(id(one) in self.moving for one in tree_leaves((args, given)))

    def _noted(self, function: Any, args: Any, given: Any, count: Any) -> torch.Tensor:
        """A mean within a module, of which its own loss may be made."""
        each = function(*args, **given | {"reduction": "none"})
        if function is F.ctc_loss:  # its mean is over samples, each divided by its own length
            each = each / torch.as_tensor(args[3], device=each.device).clamp(min=1)
        if args[0].dtype in NARROW:
            each = each.float()
        if count is None:  # all numbers, or all samples with probabilities of all classes
            count = len(args[1]) if function in _OF_CLASSES else each.numel()
        count = torch.as_tensor(count, dtype=each.dtype, device=each.device)
        mean = each.sum() / torch.where(count > 0, count, 1)
        self.means.append(CountedMean(mean, count))
        return mean.clone()  # which the module may change in place


def _absent(outputs: torch.Tensor, *rest: Any, **given: Any) -> torch.Tensor:
    """The loss of outputs that are not there."""
    return outputs.new_full((), torch.nan)


def _counted(function: Any, outputs: Any, labels: Any, *rest: Any, **given: Any) -> Any:
    """Count that a mean divides by: a number, or the sum of weights; None: all."""
    weight = given.get("weight")
    if function in _OF_CLASSES and not labels.is_floating_point():
        counts = labels != given["ignore_index"]
        return counts.sum() if weight is None else weight[labels[counts]].sum()
    return weight.sum() if function in _OVER_WEIGHTS and weight is not None else None


def _whole(function: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments that a mode was given for one of torch's losses, with one that torch leaves out.

    ``l1_loss`` of torch 2.13 does not tell modes its weight, which its frame still has.
    """
    given = dict(kwargs or {})
    if function is F.l1_loss and "weight" not in given:
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code is not F.l1_loss.__code__:
            frame = frame.f_back
        if frame is not None and "weight" in frame.f_locals:
            given["weight"] = frame.f_locals["weight"]
    return given


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

    def forget(self) -> None:
        """The program has set attributes of the module, from which weights may follow."""
        self._weights = None

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
