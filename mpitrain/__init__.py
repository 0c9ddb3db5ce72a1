"""Data, pipeline and tensor parallel training over MPI, driven by ``collectives``."""

from typing import TYPE_CHECKING

from collectives.extras import names_of

if TYPE_CHECKING:
    from collectives import __version__
    from mpitrain.config import Config, ConfigError, load
    from mpitrain.data.stream import Stream
    from mpitrain.objective.metrics import AllSamples
    from mpitrain.ranks.stop import Stopped
    from mpitrain.run import train
    from mpitrain.trainer import Trainer

#: Planning and reports start no MPI.
__getattr__, __dir__ = names_of(
    __name__,
    {
        "collectives": "__version__",
        "mpitrain.config": "Config ConfigError load",
        "mpitrain.data.stream": "Stream",
        "mpitrain.objective.metrics": "AllSamples",
        "mpitrain.ranks.stop": "Stopped",
        "mpitrain.run": "train",
        "mpitrain.trainer": "Trainer",
    },
)
__all__ = [
    "AllSamples", "Config", "ConfigError", "Stopped", "Stream", "Trainer", "__version__", "load",
    "train",
]  # fmt: skip
