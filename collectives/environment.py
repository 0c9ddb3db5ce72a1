"""Readers of environment variables, one for each kind of value."""

import math
import os
from collections.abc import Mapping

_ON = ("1", "true", "yes", "on")
_OFF = ("0", "false", "no", "off")


def switch(name: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a variable switches something on; unset or empty, it does not.

    Raises:
        ValueError: the value is none of 1, true, yes, on, 0, false, no, off.
    """
    given = environment.get(name, "")
    word = given.strip().lower()
    if word in _ON:
        return True
    if not word or word in _OFF:
        return False
    raise ValueError(
        f"{name}={given!r} is neither on ({', '.join(_ON)}) nor off ({', '.join(_OFF)}, or nothing)"
    )


def choice(name: str, words: tuple[str, ...], environment: Mapping[str, str] = os.environ) -> str:
    """The word that a variable gives; the first of ``words`` if it is unset or empty.

    Raises:
        ValueError: the value is none of ``words``.
    """
    given = environment.get(name, "")
    word = given.strip() or words[0]
    if word not in words:
        raise ValueError(f"{name}={given!r} is none of {', '.join(words[:-1])} and {words[-1]}")
    return word


def seconds(name: str, environment: Mapping[str, str] = os.environ) -> float | None:
    """Seconds that a variable gives; ``None`` if it is unset or empty, 0 for no limit.

    Raises:
        ValueError: the value is no finite number from 0 on.
    """
    given = environment.get(name, "")
    if not given.strip():
        return None
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name}={given!r} must be a number of seconds; 0 is no limit")
    return value
