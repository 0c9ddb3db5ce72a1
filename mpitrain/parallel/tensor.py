"""Tensor parallelism: ranks that share each layer, and the layers between them that communicate.

A matrix product ``x A B`` is cut as ``sum_r (x A_r) B_r``: columns of A and rows of B to each rank
r, no message between the two (Megatron, Shoeybi et al. 2019).  :class:`Enter` stands before such a
part of a model and :class:`Leave` after it.  With ``sequence``, the ranks share the positions of
what lies between the parts too (Korthikanti et al. 2022): norms and residuals are computed once
over the group, the messages have the same bytes.
"""

from mpi4py import MPI

from mpitrain.arrays import Array, Parameters, array_namespace
from mpitrain.group import TensorGroup
from mpitrain.nn.layer import Elementwise, widened


class Enter(Elementwise):
    """Into a part of the model that the group shares: x as it is, the sum of gradients back.

    With ``sequence``: positions gathered, the sum of gradients scattered.
    """

    def __init__(self, group: TensorGroup, *, sequence: bool = False) -> None:
        self.group = group
        self.sequence = sequence

    def forward(self, parameters: Parameters, x: Array) -> tuple[Array, None]:
        return (self.group.gather(x) if self.sequence else x), None

    def backward(self, parameters: Parameters, saved: None, dy: Array) -> tuple[Array, None]:
        return (self.group.scatter(dy) if self.sequence else self.group.sum(dy)), None


class Leave(Elementwise):
    """Out of it: the sum of x over the group, the gradient back as it is.

    With ``sequence``: each rank takes its positions of the sum, and gradients are gathered.
    """

    def __init__(self, group: TensorGroup, *, sequence: bool = False) -> None:
        self.group = group
        self.sequence = sequence

    def forward(self, parameters: Parameters, x: Array) -> tuple[Array, None]:
        return (self.group.scatter(x) if self.sequence else self.group.sum(x)), None

    def backward(self, parameters: Parameters, saved: None, dy: Array) -> tuple[Array, None]:
        return (self.group.gather(dy) if self.sequence else dy), None


class VocabularyLoss:
    """Softmax cross-entropy of scores whose columns the ranks of a group share.

    Two numbers a row are summed over the group and one compared, rather than gathering the scores.
    """

    def __init__(self, group: TensorGroup, classes: int) -> None:
        self.group = group
        self.classes = classes

    def __call__(self, scores: Array, labels: Array, divisor: float) -> tuple[float, Array]:
        """Sum over samples of ``-log softmax(scores)[label] / divisor``, and its gradient.

        With the labels of the *global* batch as ``divisor``, the sum over ranks of the values and
        of the gradients is that of the global mean, however the batch was dealt out.

        Args:
            scores: shape (..., own classes); 16-bit floats are computed with in float32.
            labels: integers of shape (...).
            divisor: number of labels over which the caller averages.
        """
        xp = array_namespace(scores)
        wide = widened(scores)
        rows = wide.reshape(-1, wide.shape[-1])
        bounds = self.group.share(self.classes)
        column = labels.reshape(-1) - bounds.start
        own = (column >= 0) & (column < rows.shape[1])
        where = (xp.nonzero(own)[0], column[own])

        shifted = rows - self.group.sum(rows.max(axis=1, initial=-xp.inf), MPI.MAX)[:, None]
        picked = xp.zeros((2, len(rows)), rows.dtype)
        picked[0, own] = shifted[where]
        gradient = xp.exp(shifted, out=shifted)
        picked[1] = gradient.sum(axis=1)
        picked = self.group.sum(picked)
        loss = (xp.log(picked[1]) - picked[0]).sum() / divisor
        gradient /= picked[1][:, None]
        gradient[where] -= 1
        gradient /= divisor
        return float(loss), gradient.reshape(scores.shape).astype(scores.dtype, copy=False)

    def right(self, scores: Array, labels: Array) -> int:
        """How many labels have the largest score; of equal scores the first counts."""
        xp = array_namespace(scores)
        if not labels.size:
            scores = scores.reshape(0, scores.shape[-1])
        rows = widened(scores).reshape(-1, scores.shape[-1])
        best = rows.max(axis=1, initial=-xp.inf)
        index = rows.argmax(axis=1) + self.group.share(self.classes).start
        highest = self.group.sum(best, MPI.MAX)
        index = xp.where(best == highest, index, self.classes)
        first = self.group.sum(index, MPI.MIN)
        return int((first == labels.reshape(-1)).sum())
