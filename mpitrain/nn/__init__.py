"""Pure layers: parameters go in, gradients come out, and no state stays in between.

Shape suffixes name the axes of arrays: N samples, H rows (or heads), W columns, C channels, I input
features, O output features, K elements of a window, T positions, D features of a position, E of a
head, V tokens.
"""

from mpitrain.arrays import Array, Parameters, Shape, array_namespace
from mpitrain.nn.activation import GELU, Flatten, ReLU
from mpitrain.nn.attention import Attention, CausalAttention
from mpitrain.nn.batch_norm import BatchNorm
from mpitrain.nn.chain import Chain, Recomputed, Residual, Wrapper
from mpitrain.nn.context import Context
from mpitrain.nn.convolution import Conv2d
from mpitrain.nn.dropout import Dropout
from mpitrain.nn.experts import Experts, Routing
from mpitrain.nn.layer import Layer
from mpitrain.nn.linear import Bias, Linear
from mpitrain.nn.normalization import GroupNorm, LayerNorm
from mpitrain.nn.pooling import AveragePool2d, GlobalAveragePool, MaxPool2d

__all__ = [
    "GELU",
    "Array",
    "Attention",
    "AveragePool2d",
    "BatchNorm",
    "Bias",
    "CausalAttention",
    "Chain",
    "Context",
    "Conv2d",
    "Dropout",
    "Experts",
    "Flatten",
    "GlobalAveragePool",
    "GroupNorm",
    "Layer",
    "LayerNorm",
    "Linear",
    "MaxPool2d",
    "Parameters",
    "ReLU",
    "Recomputed",
    "Residual",
    "Routing",
    "Shape",
    "Wrapper",
    "array_namespace",
]
