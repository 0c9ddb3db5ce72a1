"""Curves of a run for TensorBoard, written by tensorboardX."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from collectives.errors import install
from mpitrain.config import ConfigError
from mpitrain.metrics.records import Epoch, Record, Step, Write

_OF_A_STEP = ("loss", "grad_norm", "lr", "samples_per_s", "comm_share", "wait_share", "read_share")


def check() -> None:
    """Raises ConfigError if tensorboardX is not installed."""
    if find_spec("tensorboardX") is None:
        cure = install("tensorboardX", "tensorboard")
        raise ConfigError(f"run.tensorboard needs tensorboardX: {cure}")


@contextmanager
def curves(folder: Path, done: int = 0) -> Iterator[Write]:
    """Writes event files to a folder; hides curves of an earlier run after step ``done``."""
    from tensorboardX import SummaryWriter  # type: ignore[import-untyped]

    with SummaryWriter(str(folder), purge_step=done + 1 if done else None) as writer:
        last = done

        def write(record: Record) -> None:
            nonlocal last
            curves: dict[str, float] = {}
            if isinstance(record, Step):
                last = record.step
                curves = {name: getattr(record, name) for name in _OF_A_STEP}
                if record.served:
                    curves |= {"lag": record.served.lag, "lag_max": record.served.lag_max}
            elif isinstance(record, Epoch):
                curves = {"loss": record.test_loss, **record.metrics}
                curves = {f"test_{name}": value for name, value in curves.items()}
            for name, value in curves.items():
                writer.add_scalar(name, value, last)

        yield write
