"""Convolutional networks on images, whole or shared by tensor ranks.

Tensor ranks share the filters of one convolution and the channels of the next, so that two
convolutions need one sum over the ranks forward and one backward.
"""

from itertools import pairwise

from mpitrain import nn
from mpitrain.config.numbers import norm_groups
from mpitrain.group import TensorGroup
from mpitrain.models import perceptron
from mpitrain.parallel.tensor_parallel import Enter, Leave


def vgg(
    shape: nn.Shape,
    channels: tuple[int, ...],
    hidden: tuple[int, ...],
    classes: int,
    convolutions: int,
    group: TensorGroup,
) -> dict[str, nn.Layer]:
    """Blocks of 3x3 convolutions and 2x2 max pooling, then linear layers (Simonyan 2015).

    Pooling lies between two convolutions that share channels, too, as it works channel by channel.

    ``ValueError``: the images are too small for so many blocks.
    """
    found: dict[str, nn.Layer] = {}
    last = len(channels) * convolutions - 1
    for block, (before, after) in enumerate(pairwise([shape[-1], *channels])):
        parts: dict[str, nn.Layer] = {}
        for index in range(convolutions):
            inputs, number = after if index else before, block * convolutions + index
            if number % 2:
                parts |= _second(inputs, after, index, group)
            elif number < last:
                parts |= _first(inputs, after, index, group)
            else:
                parts[f"convolution{index}"] = nn.Conv2d(inputs, after, 3, padding=1)
            parts[f"relu{index}"] = nn.ReLU()
        found[f"block{block}"] = nn.Chain({**parts, "pool": nn.MaxPool2d(2)})
    images = nn.Chain(found).output_shape(shape)
    return found | perceptron.layers(images, hidden, classes, group, "linear")


def _first(
    inputs: int, outputs: int, index: int, group: TensorGroup, stride: int = 1
) -> dict[str, nn.Layer]:
    """The first of two convolutions, whose filters the group shares."""
    convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, split="outputs")
    return {f"enter{index}": Enter(group), f"convolution{index}": convolution}


def _second(inputs: int, outputs: int, index: int, group: TensorGroup) -> dict[str, nn.Layer]:
    """The second of two convolutions, whose channels the group shares."""
    return {
        f"convolution{index}": nn.Conv2d(inputs, outputs, 3, padding=1, split="channels"),
        f"leave{index}": Leave(group),
        f"bias{index}": nn.Bias(outputs),
    }


def resnet(
    shape: nn.Shape, channels: tuple[int, ...], classes: int, group: TensorGroup
) -> dict[str, nn.Layer]:
    """Residual blocks of two 3x3 convolutions, halving the image where channels grow (He 2016).

    Group norm replaces batch norm: samples are independent, so any layout of ranks trains the same
    model.
    """
    stem = {"convolution": nn.Conv2d(shape[-1], channels[0], 3, padding=1)}
    found: dict[str, nn.Layer] = {"stem": nn.Chain(stem)}
    for block, (before, after) in enumerate(pairwise([channels[0], *channels])):
        stride = 2 if block else 1
        body: dict[str, nn.Layer] = {
            "norm0": nn.GroupNorm(norm_groups(before), before),
            "relu0": nn.ReLU(),
            **_first(before, after, 0, group, stride),
            "norm1": nn.GroupNorm(norm_groups(after), after, split=True),
            "relu1": nn.ReLU(),
            **_second(after, after, 1, group),
        }
        straight: dict[str, nn.Layer] | None = None
        if stride > 1 or before != after:
            straight = {"convolution": nn.Conv2d(before, after, 1, stride=stride)}
        found[f"block{block}"] = nn.Residual(body, straight)
    found["head"] = nn.Chain(
        {
            "norm": nn.GroupNorm(norm_groups(channels[-1]), channels[-1]),
            "relu": nn.ReLU(),
            "pool": nn.GlobalAveragePool(),
            "linear": nn.Linear(channels[-1], classes),
        }
    )
    nn.Chain(found).output_shape(shape)
    return found
