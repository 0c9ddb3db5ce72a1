"""Tensor parallelism: ranks share each layer, and layers between the shared parts communicate.

A matrix product ``x A B`` is cut as ``sum_r (x A_r) B_r``: columns of A and rows of B to each rank
r, no message between the two (Megatron, Shoeybi et al. 2019).  :class:`Enter` stands before such a
part of a model and :class:`Leave` after it.  With ``sequence``, the ranks also share the positions
between the parts (Korthikanti et al. 2022): norms and residuals are computed once over the group,
and the messages have the same bytes.
"""

from mpitrain.arrays import Array, Parameters
from mpitrain.group import TensorGroup
from mpitrain.nn.layer import Elementwise


class _Boundary(Elementwise):
    """An end of a part of the model that a group shares, perhaps by positions around it."""

    def __init__(self, group: TensorGroup, *, sequence: bool = False) -> None:
        self.group = group
        self.sequence = sequence


class Enter(_Boundary):
    """Entry of a part of the model that the group shares: forward x, backward the sum of gradients.

    With ``sequence``: forward gathers positions, backward scatters the sum of gradients.
    """

    by_point = True

    def forward(self, parameters: Parameters, x: Array) -> tuple[Array, None]:
        return (self.group.gather(x) if self.sequence else x), None

    def backward(self, parameters: Parameters, saved: None, dy: Array) -> tuple[Array, None]:
        return (self.group.scatter(dy) if self.sequence else self.group.sum(dy)), None


class Leave(_Boundary):
    """Exit of such a part: forward the sum of x over the group, backward the gradient.

    With ``sequence``: forward scatters the sum, backward gathers the gradients.
    """

    by_point = True

    def forward(self, parameters: Parameters, x: Array) -> tuple[Array, None]:
        return (self.group.scatter(x) if self.sequence else self.group.sum(x)), None

    def backward(self, parameters: Parameters, saved: None, dy: Array) -> tuple[Array, None]:
        return (self.group.gather(dy) if self.sequence else dy), None
