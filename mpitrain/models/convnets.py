"""Convolutional networks on images."""

from itertools import pairwise

from mpitrain import nn
from mpitrain.models.perceptron import after_flatten


def vgg(
    shape: nn.Shape,
    channels: tuple[int, ...],
    hidden: tuple[int, ...],
    classes: int,
    convolutions: int,
) -> dict[str, nn.Layer]:
    """Blocks of 3x3 convolutions and 2x2 max pooling, then linear layers (Simonyan 2015).

    ``ValueError``: the images are too small for so many blocks.
    """
    found: dict[str, nn.Layer] = {}
    for block, (before, after) in enumerate(pairwise([shape[-1], *channels])):
        parts: dict[str, nn.Layer] = {}
        for index in range(convolutions):
            inputs = after if index else before
            parts[f"convolution{index}"] = nn.Conv2d(inputs, after, 3, padding=1)
            parts[f"relu{index}"] = nn.ReLU()
        found[f"block{block}"] = nn.Chain({**parts, "pool": nn.MaxPool2d(2)})
    (width,) = nn.Chain({**found, "flatten": nn.Flatten()}).output_shape(shape)
    return found | after_flatten([width, *hidden, classes])


def resnet(shape: nn.Shape, channels: tuple[int, ...], classes: int) -> dict[str, nn.Layer]:
    """Residual blocks of two 3x3 convolutions, halving the image where channels grow (He 2016).

    Group norm replaces batch norm: samples are independent, so any layout of ranks trains the same
    model.
    """
    stem = {"convolution": nn.Conv2d(shape[-1], channels[0], 3, padding=1)}
    found: dict[str, nn.Layer] = {"stem": nn.Chain(stem)}
    for block, (before, after) in enumerate(pairwise([channels[0], *channels])):
        stride = 2 if block else 1
        body: dict[str, nn.Layer] = {
            "norm0": nn.GroupNorm(_groups(before), before),
            "relu0": nn.ReLU(),
            "convolution0": nn.Conv2d(before, after, 3, stride=stride, padding=1),
            "norm1": nn.GroupNorm(_groups(after), after),
            "relu1": nn.ReLU(),
            "convolution1": nn.Conv2d(after, after, 3, padding=1),
        }
        straight: dict[str, nn.Layer] | None = None
        if stride > 1 or before != after:
            straight = {"convolution": nn.Conv2d(before, after, 1, stride=stride)}
        found[f"block{block}"] = nn.Residual(body, straight)
    found["head"] = nn.Chain(
        {
            "norm": nn.GroupNorm(_groups(channels[-1]), channels[-1]),
            "relu": nn.ReLU(),
            "pool": nn.GlobalAveragePool(),
            "linear": nn.Linear(channels[-1], classes),
        }
    )
    nn.Chain(found).output_shape(shape)
    return found


def _groups(channels: int) -> int:
    return next(groups for groups in (8, 4, 2, 1) if channels % groups == 0)
