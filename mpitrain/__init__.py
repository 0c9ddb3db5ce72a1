"""Data, pipeline and tensor parallel training over MPI, driven by ``collectives``."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collectives import __version__
    from mpitrain.config import Config, ConfigError, load
    from mpitrain.data.stream import Stream
    from mpitrain.ranks.stop import Stopped
    from mpitrain.run import train
    from mpitrain.trainer import Trainer

_WHERE = {
    "__version__": "collectives",
    "Config": "mpitrain.config",
    "ConfigError": "mpitrain.config",
    "load": "mpitrain.config",
    "Stopped": "mpitrain.ranks.stop",
    "Stream": "mpitrain.data.stream",
    "Trainer": "mpitrain.trainer",
    "train": "mpitrain.run",
}
__all__ = ["Config", "ConfigError", "Stopped", "Stream", "Trainer", "__version__", "load", "train"]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that planning and reports start no MPI."""
    if name not in _WHERE:
        raise AttributeError(f"module 'mpitrain' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
