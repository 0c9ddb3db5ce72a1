"""The tables that say how ranks exchange less: what is sent, and when."""

from typing import Literal

from msgspec import Struct

from mpitrain.config.numbers import Whole


class Compress(Struct, frozen=True, forbid_unknown_fields=True):
    """[compress]

    Attributes:
        codec: how the gradients of matrices are coded between replicas: ``bf16``,
            ``powersgd:rank=4`` and others, which docs/communication.md lists; ``none``: they are
            not.  ``auto`` times dense sums and a few codes before the first step, and takes the
            fastest on this link, which may be ``none``.
        feedback: whether what a step's codes leave out is added to the next step's gradients;
            ``auto``: where the code needs it.
        start: first steps, in which gradients travel as they are.
        least: elements below which a matrix travels as it is; vectors always do.
        exchange: of codes that do not add up: ``two_phase`` sends each shard to its owner and the
            owner's sum to all; ``gathered`` sends all codes to all, which rounds once, not twice;
            ``auto`` is ``gathered`` on two ranks, where it sends no more, else ``two_phase``.
        flush_every: of codes that add up: steps after which the replicas average what they left
            out, at the price of one dense all-reduce; 0: never.
        level: who codes: each rank (``ranks``); or one rank of each node (``nodes``), the sum of
            its node's gradients, which travel as they are inside of it.
        units: what codes leave out is kept as a ``gradient``, and later has the learning rate of
            the step that sends it; or as an ``update``, the rate of its own step times the
            gradient, so that a rate that falls meanwhile does not change it.
    """

    codec: str = "none"
    feedback: Literal["auto", "on", "off"] = "auto"
    start: Whole = 0
    least: Whole = 1024
    exchange: Literal["auto", "two_phase", "gathered"] = "auto"
    flush_every: Whole = 0
    units: Literal["gradient", "update"] = "gradient"
    level: Literal["ranks", "nodes"] = "ranks"
