"""Notes on the keys of a job: numbers that they may hold, what reads them, how TOML writes them."""

import json
import re
from typing import Annotated, Any

from msgspec import Meta

Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
#: Share of something, neither nothing nor all of it.
Fraction = Annotated[float, Meta(gt=0, lt=1)]
#: Share of something, which may be nothing but not all of it.
Part = Annotated[float, Meta(ge=0, lt=1)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Counts = tuple[Count, ...]
#: Count that may be 0.
Whole = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class ReadBy:
    """A note on a key: it is read with some values of another key of its table.

    Attributes:
        key: the other key.
        values: its values that read this one; none: all but its default.
    """

    def __init__(self, key: str, *values: Any) -> None:
        self.key, self.values = key, values

    def reads(self, value: Any, default: Any) -> bool:
        """Whether this key is read where the other one has a value."""
        return value in self.values if self.values else value != default


def norm_groups(channels: int) -> int:
    """Groups of channels that group norm takes together in a resnet."""
    return next(groups for groups in (8, 4, 2, 1) if channels % groups == 0)


def toml(value: Any) -> str:
    """A value as a job file has it."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml, value))}]"
    return number(value) if isinstance(value, float) else json.dumps(value)


def number(value: float) -> str:
    """``0.05``, ``1e-8``, ``65536``."""
    return re.sub(r"\.0$|(?<=e)\+?0?", "", str(value)).replace("e-0", "e-")
