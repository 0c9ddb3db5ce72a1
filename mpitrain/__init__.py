"""Distributed training on hand-written MPI collectives: ``python -m mpitrain train job.toml``."""

from mpitrain.config import Config, ConfigError, load
from mpitrain.trainer import Trainer

__all__ = ["Config", "ConfigError", "Trainer", "load"]
