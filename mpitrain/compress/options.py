"""Checks of codecs' options, and the name of a codec with its options."""

from dataclasses import fields
from math import isfinite
from typing import Any, ClassVar


class Named:
    """Codec whose ``str`` is its name in a job file, with the options that are not defaults."""

    name: ClassVar[str]

    def __str__(self) -> str:
        values = {f.name: (getattr(self, f.name), f.default) for f in fields(self)}  # type: ignore[arg-type]
        changed = [f"{key}={shown(v)}" for key, (v, default) in values.items() if v != default]
        return f"{self.name}:{','.join(changed)}" if changed else self.name


def shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def expect_least(name: str, value: float, least: float) -> None:
    """Raises ValueError if ``value`` is below ``least`` or no number."""
    if not (isfinite(value) and value >= least):
        raise ValueError(f"{name} is {value}; it must be at least {least}")


def expect_share(name: str, value: float) -> None:
    """Raises ValueError if ``value`` is no share, above 0 and at most 1."""
    if not 0 < value <= 1:
        raise ValueError(f"{name} is {value}; it is a share, above 0 and at most 1")


def expect_decay(name: str, value: float) -> None:
    """Raises ValueError if ``value`` is no decay, at least 0 and below 1."""
    if not 0 <= value < 1:
        raise ValueError(f"{name} is {value}; it must be at least 0 and below 1")


def expect_block(block: int, *, may_be_all: bool = False) -> None:
    """Raises ValueError if ``block`` is no number of elements."""
    if block < (0 if may_be_all else 1):
        whole = ", or 0 for one block of all" if may_be_all else ""
        raise ValueError(f"block is {block}; it must be at least 1 element{whole}")


def kept_of(n: int, keep: float) -> int:
    """Number of elements in a share of n, rounded, at least one."""
    return min(n, max(1, round(keep * n)))
