"""Models by name: chains of named layers, cut between them into stages."""

from collections.abc import Callable, Mapping
from typing import assert_never

from mpitrain import extras, nn, objective
from mpitrain.config import Config, ConfigError
from mpitrain.data.dataset import Dataset
from mpitrain.group import TensorGroup
from mpitrain.models.model import SequentialModel
from mpitrain.objective import LossFunction

__all__ = ["SequentialModel", "build"]


def build(
    config: Config,
    data: Dataset,
    group: TensorGroup | None = None,
    replicas: TensorGroup | None = None,
    layers: Mapping[str, nn.Layer] | None = None,
    loss: LossFunction | None = None,
    rows: TensorGroup | None = None,
) -> SequentialModel:
    """The model of a job for its data.

    Args:
        config: the job.
        data: the training data.
        group: ranks that share each layer.
        replicas: data-parallel ranks, among which a recommender's tables or experts are spread.
        layers, loss: replacements of the model and loss that the job's tables describe.
        rows: ranks that share the rows of each image.

    Raises:
        ConfigError: the images are too small for the blocks of a convnet, ``layers`` is empty, or
            ranks cannot share the rows of their images.
    """
    group = group or TensorGroup()
    # The ranks of a group share the columns of a gpt's scores; others' are whole before the loss.
    columns = group if layers is None and config.model.kind == "gpt" else TensorGroup()
    if layers is None:
        layers = _layers(config, data, group, replicas or TensorGroup())
    elif group.size > 1:
        layers = _shared(layers, group)
    if not layers:
        raise ConfigError("model: it has no layers, and nothing would be trained; give it some")
    if rows is not None:
        try:
            layers = extras.in_rows(layers, data.input_shape, rows)
        except ValueError as error:
            raise ConfigError(f"parallel.space: {error}") from error
    if config.parallel.recompute:
        layers = {name: nn.Recomputed(layer) for name, layer in layers.items()}
    return SequentialModel(layers, loss or objective.build(config.loss, data, columns), columns)


def _layers(
    config: Config, data: Dataset, group: TensorGroup, replicas: TensorGroup
) -> dict[str, nn.Layer]:
    own, shape, classes = config.model, data.input_shape, data.outputs
    match own.kind:
        case "mlp":
            return extras.make_mlp(shape, own.hidden, classes, group)
        case "convnet" | "vgg" | "resnet":
            convolutions = 1 if own.kind == "convnet" else 2
            try:
                if own.kind == "resnet":
                    return extras.make_resnet(shape, own.channels, classes, group)
                return extras.make_vgg(
                    shape, own.channels, own.hidden, classes, convolutions, group
                )
            except ValueError as error:
                raise ConfigError(
                    f"model.channels: {len(own.channels)} blocks are too many for images of shape "
                    f"{shape} ({error})"
                ) from error
        case "gpt":
            sizes = classes, config.data.context, own.width, own.layers, own.heads
            sequence = config.parallel.sequence and group.size > 1
            mixture = _mixture(config, group, replicas) if own.experts else None
            return extras.make_gpt(
                *sizes, group, sequence=sequence, dropout=own.dropout, mixture=mixture
            )
        case "recommender":
            return extras.make_recommender(
                config.data.tables, config.data.rows, own.width, own.hidden, classes, replicas
            )
        case _:
            assert_never(own.kind)


def _mixture(
    config: Config, tensor: TensorGroup, group: TensorGroup
) -> Callable[[Callable[[], nn.Layer]], nn.Layer]:
    """A function that makes a mixture of the experts that another function makes."""
    own, algorithm = config.model, config.parallel.alltoall
    routing = nn.Routing(own.top, own.capacity, own.balance, own.router_z)

    def mixture(expert: Callable[[], nn.Layer]) -> nn.Layer:
        experts = [expert() for _ in range(own.experts)]
        return nn.Experts(own.width, experts, routing, group, tensor, algorithm)

    return mixture


def _shared(layers: Mapping[str, nn.Layer], group: TensorGroup) -> dict[str, nn.Layer]:
    """A program's own layers as the ranks of a tensor group share them."""
    found = {}
    for name, layer in layers.items():
        try:
            found[name] = layer.shared(group)
        except ValueError as error:
            raise ConfigError(f"parallel.tensor: {name} {error}") from error
    cuts: dict[str, tuple[int | None, int]] = {}
    for name, layer in found.items():
        for own in layer.shapes():
            whole = layer.tied.get(own, f"{name}.{own}")
            cut = layer.split.get(own), layer.fused.get(own, 1)
            if cuts.setdefault(whole, cut) != cut:
                raise ConfigError(
                    f"parallel.tensor: {name}.{own} is {whole}, too, and one of the two alone is "
                    "shared; name both in splits=, or neither"
                )
    if not any(layer.split for layer in found.values()):
        raise ConfigError(
            "parallel.tensor: nothing says how tensor ranks share the model; give "
            'splits={"name": "columns", ...} for its matrices (docs/huggingface.md), or leave '
            "parallel.tensor out"
        )
    return found
