"""Tensor parallelism: ranks that share each layer, and the layers between them that communicate.

A matrix product ``x A B`` is cut as ``sum_r (x A_r) B_r``: columns of A and rows of B to each rank
r, no message between the two (Megatron, Shoeybi et al. 2019).  :class:`Enter` stands before such a
part of a model and :class:`Leave` after it.  With ``sequence``, the ranks share the positions of
what lies between the parts too (Korthikanti et al. 2022): norms and residuals are computed once
over the group, the messages have the same bytes.
"""

from mpitrain.arrays import Array, Parameters
from mpitrain.group import TensorGroup
from mpitrain.nn.layer import Elementwise


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
