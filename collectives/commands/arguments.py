"""What several commands read from the command line."""

import argparse
import math
import re
from typing import TYPE_CHECKING

from collectives.analysis.own import named
from collectives.contracts import CONTRACTS

if TYPE_CHECKING:
    #: To which a command adds its parser.
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


#: Numbers of ranks in one range; more are a slip.
_MOST_NUMBERS = 1 << 20


def positive(text: str) -> int:
    """A number from 1 on."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def count(text: str) -> int:
    """A number from 0 on."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 on")
    return int(text)


def above_zero(text: str) -> float:
    """A finite number above 0."""
    if not (value := not_negative(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def not_negative(text: str) -> float:
    """A finite number from 0 on."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number from 0 on")
    return value


def size(text: str) -> int:
    """``"64M"`` -> 67108864."""
    match = re.fullmatch(r"(\d+)([KMG]?)i?B?", text.strip(), re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"cannot read the size {text!r}; write 8, 4K, 1M or 2G")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2].upper()]


def split(text: str) -> list[str]:
    """At commas, but those between an algorithm's options: ``ring,parameter_server:servers=2``."""
    return [name for name in re.split(r",(?![\w]+=)", text) if name]


def powers(text: str) -> list[int]:
    """``"8..64"`` -> ``[8, 16, 32, 64]``; ``"4,6"`` -> ``[4, 6]``."""
    first, dots, last = text.partition("..")
    if not dots:
        return ranks(text)
    if not (first.isdecimal() and last.isdecimal()) or int(first) < 1:
        raise argparse.ArgumentTypeError(f"cannot read {text!r}; write e.g. 8..65536 or 4,6,8")
    if int(first) > int(last):
        raise argparse.ArgumentTypeError(f"{text} is empty; write {last}..{first}")
    sizes = [int(first)]
    while 2 * sizes[-1] <= int(last):
        sizes.append(2 * sizes[-1])
    return sizes


def ranks(text: str) -> list[int]:
    """``"1-4,8"`` -> ``[1, 2, 3, 4, 8]``."""
    sizes: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or int(first) < 1:
            raise argparse.ArgumentTypeError(f"cannot read {text!r}; write e.g. 1-33,64")
        numbers = range(int(first), int(last or first) + 1)
        if not numbers:
            raise argparse.ArgumentTypeError(f"{part} is empty; write {last}-{first}")
        if numbers.stop - numbers.start > _MOST_NUMBERS:
            raise argparse.ArgumentTypeError(f"{part} is more than {_MOST_NUMBERS} numbers")
        sizes += numbers
    return sizes


def known(text: str) -> list[str]:
    """``"ring,mine.py:biring"`` -> ``["ring", "biring"]``: those of files and packages are proved
    and registered.

    Raises:
        UnknownAlgorithm: a file has no such algorithm.
        ScheduleError: one that was found is wrong.
    """
    return [named(name) for name in split(text)]


def collective_or_file(text: str) -> str:
    """A collective, or ``"mine.py:name"``."""
    if text not in CONTRACTS and ".py" not in text:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a collective ({', '.join(CONTRACTS)}) nor file.py:name"
        )
    return text
