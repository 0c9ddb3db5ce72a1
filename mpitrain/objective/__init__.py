"""Losses and metrics: sums over samples, however these are spread over ranks."""

from mpitrain.config import Loss as LossConfig
from mpitrain.data.dataset import Dataset
from mpitrain.group import TensorGroup
from mpitrain.objective.cross_entropy import CrossEntropy
from mpitrain.objective.elementwise import BinaryCrossEntropy, MeanSquaredError
from mpitrain.objective.loss import LossFunction

__all__ = ["BinaryCrossEntropy", "CrossEntropy", "LossFunction", "MeanSquaredError", "build"]


def build(config: LossConfig, data: Dataset, group: TensorGroup) -> LossFunction:
    """The loss of the [loss] table; ``group``: ranks that share the columns of the scores."""
    match config.name:
        case "cross_entropy":
            return CrossEntropy(group, data.classes, config.smoothing)
        case "mean_squared_error":
            return MeanSquaredError()
        case "binary_cross_entropy":
            return BinaryCrossEntropy()
