"""Closed forms of the all-reduces' costs, ours beside a textbook's.

Ours count what our schedules do on one switch where a rank has one port in each direction; the
simulator gives the same (a test says so).  The textbook is A. Rodriguez, "Deep Learning Systems",
Morgan & Claypool 2020, chapter 5; its forms leave the reduction out and let a rank use as many
ports as it has messages.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, floor, log2

from collectives.compile.cost import Model

Seconds = Callable[[Model, float, int], float]


@dataclass(frozen=True)
class Formula:
    """The cost of an all-reduce of m bytes on p ranks.

    Attributes:
        text: our closed form.
        powers_only: holds for p a power of two; other numbers of ranks are folded onto one.
        book, book_seconds: Rodriguez's form, with L for alpha and T' for beta m; ``None`` where the
            book has none.
        difference: in one sentence, why the two are not the same.
    """

    algorithm: str
    text: str
    seconds: Seconds
    powers_only: bool = False
    book: str | None = None
    book_seconds: Seconds | None = None
    difference: str = ""


def _up(p: int) -> int:
    return ceil(log2(p))


def _in_shards(steps: Callable[[int], float]) -> Seconds:
    """Seconds of a reduce-scatter and an all-gather, each of ``steps(p)`` messages in a row."""
    return lambda c, m, p: 2 * steps(p) * c.alpha + (p - 1) / p * m * (2 * c.beta + c.gamma)


_SHARDS = "2(p-1)(alpha + beta m/p) + (p-1) gamma m/p"
_HALVES = "2 log2 p alpha + (p-1)/p m (2 beta + gamma)"

FORMULAS = (
    Formula(
        "ring",
        _SHARDS,
        _in_shards(lambda p: p - 1),
        difference="Rodriguez's 'AllReduce-Ring' is not this ring but our direct",
    ),
    Formula(
        "direct",
        _SHARDS,
        _in_shards(lambda p: p - 1),
        book="T_ring = 2(L + T'/P)",
        book_seconds=lambda c, m, p: 2 * (c.alpha + c.beta * m / p),
        difference="Rodriguez gives each rank p-1 ports; with one, its messages follow one another",
    ),
    Formula(
        "butterfly",
        "log2 p (alpha + beta m + gamma m)",
        lambda c, m, p: log2(p) * (c.alpha + (c.beta + c.gamma) * m),
        powers_only=True,
        book="T_bf = log(P)(L + T')",
        book_seconds=lambda c, m, p: floor(log2(p)) * (c.alpha + c.beta * m),
        difference="the same but for the reduction",
    ),
    Formula("halving_doubling", _HALVES, _in_shards(log2), powers_only=True),
    Formula("swing", _HALVES, _in_shards(log2), powers_only=True),
    Formula(
        "circulant",
        _HALVES,
        _in_shards(_up),
        powers_only=True,
        difference="for every p, plus one alpha for each message whose blocks wrap round the end",
    ),
    Formula(
        "binomial_tree",
        "2 ceil(log2 p)(alpha + beta m) + ceil(log2 p) gamma m",
        lambda c, m, p: _up(p) * (2 * (c.alpha + c.beta * m) + c.gamma * m),
        book="T_tree = 2 log(P)(L + T')",
        book_seconds=lambda c, m, p: 2 * floor(log2(p)) * (c.alpha + c.beta * m),
        difference="the same but for the reduction and the rounding of the logarithm",
    ),
    Formula(
        "double_binary_tree",
        "at most 2 ceil(log2 p)(2 alpha + beta m) + ceil(log2 p) gamma m",
        lambda c, m, p: _up(p) * (2 * (2 * c.alpha + c.beta * m) + c.gamma * m),
        book="T_tree2 = 2 log(P)(L + T'/2)",
        book_seconds=lambda c, m, p: 2 * floor(log2(p)) * (c.alpha + c.beta * m / 2),
        difference="Rodriguez lets a parent hear from both children at once; with one port it does "
        "so twice, and only segments (double_binary_tree:segments=k) fill the links",
    ),
    Formula(
        "parameter_server",
        "2(p-1)(alpha + beta m) + (p-1) gamma m",
        lambda c, m, p: 2 * (p - 1) * (c.alpha + c.beta * m) + (p - 1) * c.gamma * m,
        book="T_PS = 2(L + T')",
        book_seconds=lambda c, m, p: 2 * (c.alpha + c.beta * m),
        difference="Rodriguez gives the server p-1 ports; with one it serves worker after worker",
    ),
)
