"""Data, pipeline and tensor parallel training over MPI, driven by ``collectives``."""

from importlib import import_module
from typing import Any

_WHERE = {
    "Config": "mpitrain.config",
    "ConfigError": "mpitrain.config",
    "load": "mpitrain.config",
    "Trainer": "mpitrain.trainer",
    "train": "mpitrain.run",
}
__all__ = ["Config", "ConfigError", "Trainer", "load", "train"]


def __getattr__(name: str) -> Any:
    """The names above, imported when they are asked for: planning and reports start no MPI."""
    if name not in _WHERE:
        raise AttributeError(f"module 'mpitrain' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
