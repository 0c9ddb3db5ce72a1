"""The tables that say how ranks exchange less: what is sent, and when."""

from typing import Literal

from msgspec import Struct

from mpitrain.config.numbers import Whole


class Compress(Struct, frozen=True, forbid_unknown_fields=True):
    """[compress]

    Attributes:
        codec: codec of the gradients of matrices between replicas: ``bf16``, ``powersgd:rank=4``
            and others, which docs/communication.md lists; ``none``: no codec.
        feedback: whether the residual, which a step's codes leave out, is added to the next step's
            gradients; ``auto``: where the codec needs it.
        start: first steps without a codec.
        least: elements below which a matrix travels as it is; vectors always do.
        exchange: path of codes that do not add up: ``two_phase`` sends each shard to its owner and
            the owner's sum to all; ``gathered`` sends all codes to all, which rounds once, not
            twice; ``auto`` is ``gathered`` on two ranks, where it sends no more, else
            ``two_phase``.
        flush_every: steps after which the replicas average the residuals of codes that add up, at
            the price of one dense all-reduce; 0: never.
        level: ranks that code: all of them, each its own gradients (``ranks``); or one rank of each
            node, the sum of its node's gradients, which travel as they are inside of it
            (``nodes``).
        units: unit of the residual: a ``gradient``, which has the learning rate of the step that
            sends it; or an ``update``, the rate of its own step times the gradient, so that a rate
            that falls meanwhile does not change it.
    """

    codec: str = "none"
    feedback: Literal["auto", "on", "off"] = "auto"
    start: Whole = 0
    least: Whole = 1024
    exchange: Literal["auto", "two_phase", "gathered"] = "auto"
    flush_every: Whole = 0
    units: Literal["gradient", "update"] = "gradient"
    level: Literal["ranks", "nodes"] = "ranks"
