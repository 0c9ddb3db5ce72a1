"""The names of metrics, and which go with which loss."""

import re

#: Names that ``evaluate.metrics`` may have; ``top5`` stands for any top-k.
NAMES = ("accuracy", "top5", "perplexity", "f1", "mae", "rmse")
_TOP = re.compile(r"top([1-9]\d*)")


def usual(loss: str) -> tuple[str, ...]:
    """The metrics of a job that names none."""
    return ("mae",) if loss == "mean_squared_error" else ("accuracy",)


def is_better_higher(name: str) -> bool | None:
    """Whether larger values of the loss, or of a metric, are better; None: unknown."""
    if name in ("loss", "perplexity", "mae", "rmse"):
        return False
    return True if name in ("accuracy", "f1") or _TOP.fullmatch(name) else None


def refusal(name: str, loss: str) -> str:
    """Why a metric of this name does not go with a loss, or nothing."""
    numbers = ("mae", "rmse")
    if name not in NAMES and not _TOP.fullmatch(name):
        return f"there is no metric {name!r}; there are {', '.join(NAMES)}"
    if loss != "cross_entropy" and name not in (*numbers, "accuracy"):
        return f"{name} is of classes, and {loss} has none"
    if loss == "cross_entropy" and name in numbers:
        return f"{name} is of numbers, and cross_entropy has classes"
    if loss == "mean_squared_error" and name == "accuracy":
        return "accuracy is of classes; mean_squared_error has mae and rmse"
    return ""
