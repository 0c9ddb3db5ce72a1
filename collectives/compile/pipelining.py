"""The number of segments that makes a schedule fastest, by the alpha-beta model."""

from typing import NamedTuple

from collectives.algorithms.segments import MOST_SEGMENTS
from collectives.compile.cost import count
from collectives.schedule import Schedule


class Model(NamedTuple):
    """The alpha-beta-gamma model of a network.

    Attributes:
        alpha: seconds a message.
        beta: seconds a byte on the way.
        gamma: seconds a byte that is reduced.
    """

    alpha: float
    beta: float
    gamma: float


def segments_for(schedule: Schedule, nbytes: int, alpha: float, beta: float) -> int:
    """:func:`best_segments` of a schedule on buffers of ``nbytes``."""
    messages = count(schedule).latency
    return best_segments(messages, nbytes / schedule.chunks, Model(alpha, beta, 0.0))


def best_segments(messages: int, nbytes: float, model: Model) -> int:
    """The number of segments that makes a schedule of so many messages in a row fastest.

    k segments take (messages - 1 + k)(alpha + beta m/k), least at k = sqrt((messages - 1) beta m /
    alpha) (Hockney's pipelining argument); at most
    :data:`~collectives.algorithms.segments.MOST_SEGMENTS`.
    """
    if messages <= 1 or model.alpha <= 0:
        return 1
    best = round(min(MOST_SEGMENTS, ((messages - 1) * model.beta * nbytes / model.alpha) ** 0.5))
    return max(1, best)
