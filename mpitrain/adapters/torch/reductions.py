"""How a program's function reduces its samples: a mean over all, over what counts, or a sum."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mpitrain.objective import Reduction

#: Losses of classes, whose means are over what counts: ``ignore_index`` and weights of classes.
_OF_CLASSES = (F.cross_entropy, F.nll_loss)
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
        is_known: whether a mean is surely one over samples with equal weights.
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
        self._last: tuple[Any, Reduced] | None = None

    def of(self, function: Callable[[Any, Any], Any], outputs: Any, labels: Any) -> Reduced:
        """The result of ``function(outputs, labels)``.

        A tuple is the sum and what counts; a number that one of torch's own losses gave is reduced
        as that loss is.  Any other result should be a mean over samples with equal weights.
        """
        with self:
            found = function(outputs, labels)
        last, self._last = self._last, None
        if isinstance(found, tuple) and len(found) == 2:
            return Reduced(*found, reduction="count")
        return last[1] if last and last[0] is found else Reduced(found)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        is_of_classes = function in _OF_CLASSES
        if is_of_classes:
            self.ignore_index = given.get("ignore_index", -100)
            is_of_classes = not args[1].is_floating_point()  # else probabilities of all classes
        if given.get("reduction") == "mean" and is_of_classes:
            total, count = self._counted(function, *args, **given)
            found = total / count
            self._last = found, Reduced(total, count, "count")
            return found
        found = function(*args, **given)
        if function in _OF_ALL or function in _OF_CLASSES:
            how: Reduction = "sum" if given.get("reduction") == "sum" else "mean"
            self._last = found, Reduced(found, reduction=how, is_known=True)
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
