"""Small integers in few bits."""

import numpy as np

from collectives.codec import Bytes
from mpitrain.arrays import Array

_POWERS = (1, 3, 9, 27, 81)


def packed(n: int, bits: int) -> int:
    return -(-n * bits // 8)


def pack(values: Array, bits: int, code: Bytes) -> None:
    """Write integers from 0 to 2**bits - 1, at most 16 bits, into ``code``.

    Integers of 1, 2, 4 or 8 bits share bytes; of others the lowest bits of all come first.
    """
    if 8 % bits == 0:
        each = 8 // bits
        groups = np.zeros((len(code), each), np.uint8)
        groups.reshape(-1)[: len(values)] = values
        code[...] = groups[:, 0]
        for place in range(1, each):
            code |= groups[:, place] << place * bits
        return
    narrow = values.astype(np.uint16)
    planes = [(narrow >> bit & 1).astype(np.bool_) for bit in range(bits)]
    code[...] = np.packbits(np.concatenate(planes))


def unpack(code: Bytes, n: int, bits: int) -> Array:
    """Integers that :func:`pack` wrote; shape (n,), uint16."""
    if 8 % bits == 0:
        each = 8 // bits
        groups = np.empty((len(code), each), np.uint16)
        for place in range(each):
            groups[:, place] = code >> place * bits & (1 << bits) - 1
        return groups.reshape(-1)[:n]
    planes = np.unpackbits(code, count=n * bits).reshape(bits, n)
    values = np.zeros(n, np.uint16)
    for bit, plane in enumerate(planes):
        values |= plane.astype(np.uint16) << bit
    return values


def packed_trits(n: int) -> int:
    """Bytes of n integers from 0 to 2: five in a byte, as 3**5 = 243."""
    return -(-n // 5)


def pack_trits(values: Array, code: Bytes) -> None:
    fives = np.zeros((len(code), 5), np.uint8)
    fives.reshape(-1)[: len(values)] = values
    code[...] = fives @ np.array(_POWERS, np.uint8)


def unpack_trits(code: Bytes, n: int) -> Array:
    """Integers that :func:`pack_trits` wrote; shape (n,), uint8."""
    table = np.arange(256)[:, None] // np.array(_POWERS) % 3
    return table.astype(np.uint8)[code].reshape(-1)[:n]
