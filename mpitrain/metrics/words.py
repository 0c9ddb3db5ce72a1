"""Numbers of a run in words."""

from collections.abc import Mapping

from mpitrain.config.metric_names import is_better_higher


def in_words(nbytes: float) -> str:
    """``3.5 MB``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{digits(nbytes / size)} {unit}"
    return f"{nbytes:.0f} B"


def digits(value: float) -> str:
    """Three digits and all before the point: ``3.5``, ``1160``."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def counted(count: int, noun: str) -> str:
    """``1 rank``, ``4 ranks``, ``4 micro-batches``."""
    ending = "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{ending if count != 1 else ''}"


def summed(algorithm: str, reason: str) -> str:
    """How gradients are summed: ``"by ring (asked for)"``, ``"not summed (one replica)"``."""
    return f"{'not summed' if algorithm == 'none' else f'by {algorithm}'} ({reason})"


def measured(metrics: Mapping[str, float]) -> str:
    """``accuracy 97.50%, top5 99.72%``."""
    return ", ".join(f"{name} {shown(name, value)}" for name, value in metrics.items())


def shown(name: str, value: float) -> str:
    """Text of a metric's value; shares are in per cent."""
    return f"{value:.2%}" if is_share(name) else f"{value:.6g}"


def is_share(name: str) -> bool:
    """Whether a metric of this name is a share."""
    return bool(is_better_higher(name))
