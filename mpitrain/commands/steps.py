"""A table of predicted steps."""

from collections.abc import Sequence

from mpitrain.metrics.words import digits, in_words
from mpitrain.search.step import PredictedStep


def table(steps: Sequence[tuple[str, PredictedStep]], batch: int) -> list[str]:
    """Layouts side by side, a line for each.

    Args:
        steps: name and step of each layout.
        batch: samples of a step.
    """
    lines = ["   ms a step  samples/s  computing  bubble  GiB a rank  sent a rank  layout"]
    lines += [
        f"{1e3 * step.seconds:12.2f} {batch / step.seconds:10.0f} {step.busy:10.1%} "
        f"{step.bubble:7.1%} {digits(max(step.memory) / 2**30):>11} "
        f"{in_words(sum(step.sent.values())):>12}  {name}"
        for name, step in steps
    ]
    return lines
