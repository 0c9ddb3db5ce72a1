"""The training job: what a TOML file may say, its defaults, and the check of what it says.

    config = load(Path("jobs/examples/digits.toml"), ["optim.lr=0.1"])

Every field is documented in the class of its table.
"""

from mpitrain.config.conflicts import expect, needs_host
from mpitrain.config.federated import Federated
from mpitrain.config.reading import configured, expect_job, expect_read, load
from mpitrain.config.server import Server
from mpitrain.config.sync import Compress, Sync
from mpitrain.config.tables import (
    Checkpoint,
    ConfigError,
    Data,
    Evaluate,
    Group,
    Loss,
    Model,
    Optim,
    Own,
    Parallel,
    Run,
    Train,
    by_key,
)
from mpitrain.config.unread import Brought
from mpitrain.config.validation import Config

__all__ = [
    "Brought", "Checkpoint", "Compress", "Config", "ConfigError", "Data", "Evaluate",
    "Federated", "Group", "Loss", "Model", "Optim", "Own", "Parallel", "Run", "Server", "Sync",
    "Train", "configured", "expect", "expect_job", "expect_read", "by_key", "load",
    "needs_host",
]  # fmt: skip
