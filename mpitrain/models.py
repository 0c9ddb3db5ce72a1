"""From the [model] table to a chain of layers."""

from itertools import pairwise
from typing import assert_never

from mpitrain import nn
from mpitrain.config import ConfigError, Model


def build(config: Model, input_shape: nn.Shape, classes: int) -> nn.Sequential:
    """The model for samples of ``input_shape`` that gives ``classes`` scores a sample.

    Args:
        config: the [model] table.
        input_shape: (rows, columns, channels).
        classes: at least 2.

    Raises:
        ConfigError: the images are too small for that many blocks of the convnet.
    """
    match config.kind:
        case "mlp":
            features: list[nn.Layer] = []
        case "convnet":
            features = _convolutions(input_shape[-1], config.channels)
        case _:
            assert_never(config.kind)
    features.append(nn.Flatten())
    try:
        (width,) = nn.Sequential(features).output_shape(input_shape)
    except ValueError as error:
        raise ConfigError(
            f"model.channels: {len(config.channels)} blocks are too many for images of shape "
            f"{input_shape} ({error})"
        ) from error
    return nn.Sequential([*features, *_perceptron([width, *config.hidden, classes])])


def _convolutions(channels: int, outputs: tuple[int, ...]) -> list[nn.Layer]:
    layers: list[nn.Layer] = []
    for before, after in pairwise([channels, *outputs]):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return layers


def _perceptron(widths: list[int]) -> list[nn.Layer]:
    layers: list[nn.Layer] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return layers[:-1]
