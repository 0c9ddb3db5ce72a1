"""When ranks talk: in every step, after several, late, or without those that come last."""

from mpitrain.sync.delayed import Delayed
from mpitrain.sync.local import Local
from mpitrain.sync.quorum import Quorum
from mpitrain.sync.strategy import Strategy
from mpitrain.sync.workers import Workers

__all__ = ["Delayed", "Local", "Quorum", "Strategy", "Workers"]
