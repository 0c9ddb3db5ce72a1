"""How a program's function reduces its samples: a mean over all, over what counts, or a sum."""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mpitrain.fields import named
from mpitrain.objective import Reduction

#: Losses of classes, whose means are over what counts: ``ignore_index`` and weights of classes.
_OF_CLASSES = (F.cross_entropy, F.nll_loss)
#: Losses of numbers, whose means are over the weights of these where they are given.
OVER_WEIGHTS = (F.mse_loss, F.l1_loss)
#: Losses whose means are over all numbers, or over all samples.
_OF_ALL = (
    F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.cosine_embedding_loss,
    F.gaussian_nll_loss, F.hinge_embedding_loss, F.huber_loss, F.kl_div, F.l1_loss,
    F.margin_ranking_loss, F.mse_loss, F.multi_margin_loss, F.multilabel_margin_loss,
    F.multilabel_soft_margin_loss, F.poisson_nll_loss, F.smooth_l1_loss, F.soft_margin_loss,
    F.triplet_margin_loss,
)  # fmt: skip


class Reduced(NamedTuple):
    """The result of a function of samples.

    Attributes:
        total: the mean, or the sum.
        count: divisor of ``total`` that makes it the mean over what counts in the samples; None
            for other reductions.
        reduction: kind of ``total``, as :data:`mpitrain.objective.Reduction` names it.
        is_known: whether a mean is surely one over samples with equal weights, and a sum adds up,
            as those of a loss of torch over the outputs and labels as they are.
    """

    total: Any
    count: Any = None
    reduction: Reduction = "mean"
    is_known: bool = False


class Reductions(TorchFunctionMode):
    """Follows torch's own losses in a function, to learn what the function's mean is over.

    Attributes:
        ignore_index: value of the labels that the last loss of classes has left out; None: there
            was none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ignore_index: int | None = None
        self._last: tuple[Any, int, Reduced] | None = None
        self._given: list[Any] = []

    def of(self, function: Callable[[Any, Any], Any], outputs: Any, labels: Any) -> Reduced:
        """The result of ``function(outputs, labels)``.

        A tuple is the sum and what counts; a number that one of torch's own losses gave, and that
        nothing has changed since, is reduced as that loss is.  Any other result should be a mean
        over samples with equal weights.
        """
        kept = getattr(function, "kept", ())
        self._given = [*named(outputs).values(), *named(labels).values(), *kept]
        with self:
            found = function(outputs, labels)
        last, self._last, self._given = self._last, None, []
        if isinstance(found, tuple) and len(found) == 2:
            return Reduced(*found, reduction="count")
        if last and last[0] is found and last[1] == found._version:
            return last[2]
        return Reduced(found)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = whole(function, kwargs)
        used = (one for one in (*args, *given.values()) if isinstance(one, torch.Tensor))
        is_known = all(any(one is other for other in self._given) for one in used)
        is_of_classes = function in _OF_CLASSES
        if is_of_classes:
            self.ignore_index = given.get("ignore_index", -100)
            is_of_classes = not args[1].is_floating_point()  # else probabilities of all classes
        is_weighed = function in OVER_WEIGHTS and given.get("weight") is not None
        if given.get("reduction") == "mean" and (is_of_classes or is_weighed):
            if is_of_classes:
                total, count = self._counted(function, *args, **given)
            else:
                total = function(*args, **given | {"reduction": "sum"})
                count = given["weight"].sum()
            found = total / count
            self._last = found, found._version, Reduced(total, count, "count", is_known)
            return found
        found = function(*args, **given)
        if function in _OF_ALL or function in _OF_CLASSES:
            how: Reduction = "sum" if given.get("reduction") == "sum" else "mean"
            self._last = found, found._version, Reduced(found, reduction=how, is_known=is_known)
        return found

    @staticmethod
    def _counted(function: Any, scores: Any, labels: Any, **given: Any) -> tuple[Any, Any]:
        """The sum of a loss of classes, and the sum of the weights of the labels that count."""
        if scores.dtype in (torch.float16, torch.bfloat16):  # a sum of 16 bits may overflow
            total = function(scores, labels, **given | {"reduction": "none"}).float().sum()
        else:
            total = function(scores, labels, **given | {"reduction": "sum"})
        counts = labels != given["ignore_index"]
        weight = given.get("weight")
        return total, counts.sum() if weight is None else weight[labels[counts]].sum()


def whole(function: Any, kwargs: Any) -> dict[str, Any]:
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
