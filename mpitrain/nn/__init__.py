"""Pure layers: parameters go in, gradients come out, nothing is remembered in between.

Shape suffixes name the axes of arrays: N samples, H rows, W columns, C channels, I input features,
O output features, K elements of a window.
"""

from mpitrain.nn.activation import GELU, ReLU
from mpitrain.nn.convolution import Conv2d
from mpitrain.nn.flatten import Flatten
from mpitrain.nn.layer import Array, Layer, Parameters, Shape, array_namespace
from mpitrain.nn.linear import Linear
from mpitrain.nn.loss import softmax_cross_entropy
from mpitrain.nn.normalization import LayerNorm
from mpitrain.nn.pooling import AveragePool2d, MaxPool2d
from mpitrain.nn.sequential import Sequential

__all__ = [
    "GELU",
    "Array",
    "AveragePool2d",
    "Conv2d",
    "Flatten",
    "Layer",
    "LayerNorm",
    "Linear",
    "MaxPool2d",
    "Parameters",
    "ReLU",
    "Sequential",
    "Shape",
    "array_namespace",
    "softmax_cross_entropy",
]
