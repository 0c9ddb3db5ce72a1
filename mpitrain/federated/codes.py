"""Changes as few, short numbers whose sums can be decoded: rotated, masked, on a shared grid.

All clients of a round have the same signs, mask and grid, so that coding is linear: the codes are
added up as they are, and only their sum is decoded.  Without ``clip`` the decoded mean is unbiased
over the draws of mask and dice (Konecny et al. 2016).
"""

from dataclasses import dataclass
from math import ceil

import numpy as np

from mpitrain.arrays import Array
from mpitrain.compress.seeds import generator, subset
from mpitrain.config.federated import Federated
from mpitrain.federated.rotation import padded, random_signs, rotate, unrotate


def most_bits(weight: int, word: int) -> int:
    """Most bits of a code such that sums with total weight ``weight`` fit into ``word`` bits."""
    return ((2**word - 1) // weight + 1).bit_length() - 1


def lengths(own: Federated, elements: int) -> tuple[int, int]:
    """Elements after rotation, from which those that are sent are drawn, and number of these."""
    length = padded(elements) if own.rotate else elements
    return length, max(1, ceil(own.kept * length)) if own.kept < 1 else length


@dataclass(frozen=True)
class Drawn:
    """Random choices that the clients of a round share.

    Attributes:
        elements: number of elements of a change.
        signs: +-1, of the padded length; None: changes are not rotated.
        kept: elements that are sent, rising.
        length: number of elements from which these are drawn.
    """

    elements: int
    signs: Array | None
    kept: Array
    length: int

    @classmethod
    def of(cls, own: Federated, seed: int, number: int, elements: int) -> "Drawn":
        """The choices of a round, counted from 0."""
        length, count = lengths(own, elements)
        signs = random_signs(length, seed, "clients", number) if own.rotate else None
        kept = np.arange(length)
        if own.kept < 1:
            kept = subset(length, count, seed, "clients", "mask", number)
        return cls(elements, signs, kept, length)

    def sent(self, change: Array) -> Array:
        """The elements of a change that are sent, rotated if that is asked for."""
        turned = change if self.signs is None else rotate(change, self.signs)
        found: Array = turned[self.kept]
        return found

    def back(self, sent: Array) -> Array:
        """A change from the elements that were sent, scaled up; the others are 0."""
        whole = np.zeros(self.length)
        whole[self.kept] = sent * (self.length / self.kept.size)
        return whole if self.signs is None else unrotate(whole, self.elements, self.signs)


@dataclass(frozen=True)
class CodeGrid:
    """A grid of ``2**bits`` numbers from ``-largest`` to ``largest``."""

    bits: int
    largest: float

    @property
    def width(self) -> float:
        return 2.0 * self.largest / (2**self.bits - 1)

    def encode(self, sent: Array, dice: np.random.Generator) -> Array:
        """The numbers' places on the grid, int64, rounded at random without bias.

        Numbers beyond the ends are cut.
        """
        if not self.width:  # the change is zero, or almost
            return np.zeros(sent.size, np.int64)
        cut = np.clip(sent, -self.largest, self.largest)
        place = (cut + self.largest) / self.width
        low = np.floor(place)
        low += dice.random(sent.size) < place - low
        return np.clip(low, 0, 2**self.bits - 1).astype(np.int64)

    def mean(self, total: Array, weight: int) -> Array:
        """The mean of numbers, float64, from the sum of their places times their weights."""
        found: Array = total.astype(np.float64) / weight * self.width - self.largest
        return found


def dice(seed: int, number: int, client: int) -> np.random.Generator:
    """Random numbers by which a client rounds in a round."""
    return generator(seed, "clients", "dice", number, client)
