"""Models by name: chains of named layers, cut between them into stages."""

from typing import assert_never

from mpitrain import nn
from mpitrain.config import Config, ConfigError
from mpitrain.data.dataset import Dataset
from mpitrain.models import convnets, gpt, perceptron, recommender
from mpitrain.models.model import Model
from mpitrain.parallel.tensor import TensorGroup

__all__ = ["Model", "build"]


def build(
    config: Config,
    data: Dataset,
    group: TensorGroup | None = None,
    replicas: TensorGroup | None = None,
) -> Model:
    """The model of a job for its data.

    Args:
        config: the job.
        data: what it is trained on.
        group: the ranks that share each layer.
        replicas: the data-parallel ranks, among which a recommender's tables are spread.

    Raises:
        ConfigError: the images are too small for that many blocks of a convnet.
    """
    own, shape, classes = config.model, data.input_shape, data.classes
    group = group or TensorGroup()
    layers: dict[str, nn.Layer]
    match own.kind:
        case "mlp":
            layers = perceptron.layers(shape, own.hidden, classes, group)
        case "convnet" | "vgg":
            layers = _fitting(
                lambda: convnets.vgg(
                    shape, own.channels, own.hidden, classes, 1 if own.kind == "convnet" else 2
                ),
                own.channels,
                shape,
            )
        case "resnet":
            layers = _fitting(
                lambda: convnets.resnet(shape, own.channels, classes), own.channels, shape
            )
        case "gpt":
            layers = gpt.layers(
                vocabulary=classes,
                context=config.data.context,
                width=own.width,
                blocks=own.layers,
                heads=own.heads,
                group=group,
                sequence=config.parallel.sequence and group.size > 1,
            )
        case "recommender":
            layers = recommender.layers(
                config.data.tables,
                config.data.rows,
                own.width,
                own.hidden,
                classes,
                replicas or TensorGroup(),
            )
        case _:
            assert_never(own.kind)
    if config.parallel.recompute:
        layers = {name: nn.Recomputed(layer) for name, layer in layers.items()}
    return Model(layers, classes, group if own.kind == "gpt" else TensorGroup())


def _fitting(make, channels: tuple[int, ...], shape: nn.Shape) -> dict[str, nn.Layer]:  # type: ignore[no-untyped-def]
    try:
        layers: dict[str, nn.Layer] = make()
    except ValueError as error:
        raise ConfigError(
            f"model.channels: {len(channels)} blocks are too many for images of shape "
            f"{shape} ({error})"
        ) from error
    return layers
