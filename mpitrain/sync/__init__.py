"""When ranks talk: in every step, after several, or late."""

from mpitrain.sync.delayed import Delayed
from mpitrain.sync.local import Local
from mpitrain.sync.strategy import Strategy
from mpitrain.sync.workers import Workers

__all__ = ["Delayed", "Local", "Strategy", "Workers"]
