"""Pure layers: parameters go in, gradients come out, and no state stays in between.

Shape suffixes name the axes of arrays: N samples, H rows (or heads), W columns, C channels, I input
features, O output features, K elements of a window, T positions, D features of a position, E of a
head, V tokens.
"""

from typing import TYPE_CHECKING

from collectives.extras import names_of
from mpitrain.arrays import Array, Parameters, Shape, array_namespace
from mpitrain.nn.activation import GELU, Flatten, ReLU
from mpitrain.nn.chain import Chain, Recomputed, Residual, Wrapper
from mpitrain.nn.context import Context
from mpitrain.nn.convolution import Conv2d
from mpitrain.nn.layer import Layer
from mpitrain.nn.linear import Bias, Linear
from mpitrain.nn.pooling import AveragePool2d, GlobalAveragePool, MaxPool2d

if TYPE_CHECKING:
    from mpitrain.nn.attention import Attention, CausalAttention
    from mpitrain.nn.batch_norm import BatchNorm
    from mpitrain.nn.dropout import Dropout
    from mpitrain.nn.experts import Experts, Routing
    from mpitrain.nn.normalization import GroupNorm, LayerNorm

__getattr__, __dir__ = names_of(
    __name__,
    {
        "mpitrain.nn.attention": "Attention CausalAttention",
        "mpitrain.nn.batch_norm": "BatchNorm",
        "mpitrain.nn.dropout": "Dropout",
        "mpitrain.nn.experts": "Experts Routing",
        "mpitrain.nn.normalization": "GroupNorm LayerNorm",
    },
)
__all__ = [
    "GELU", "Array", "Attention", "AveragePool2d", "BatchNorm", "Bias", "CausalAttention",
    "Chain", "Context", "Conv2d", "Dropout", "Experts", "Flatten", "GlobalAveragePool",
    "GroupNorm", "Layer", "LayerNorm", "Linear", "MaxPool2d", "Parameters", "ReLU",
    "Recomputed", "Residual", "Routing", "Shape", "Wrapper", "array_namespace",
]  # fmt: skip
