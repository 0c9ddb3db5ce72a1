"""Secrets in shares: any ``threshold`` of them give the secret, fewer give nothing about it.

Shamir, "How to share a secret" (1979): the secret is the value at 0 of a polynomial of degree
``threshold - 1`` with random coefficients, and a share is its value elsewhere.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence

#: The least prime above 2**256: every 32 bytes are a number of the field.
PRIME = 2**256 + 297
#: Bytes of a secret, and of a share.
SECRET_BYTES, SHARE_BYTES = 32, 33

#: A random number from 0 to less than its argument.
Below = Callable[[int], int]


def shares(
    secret: bytes, points: Sequence[int], threshold: int, below: Below = secrets.randbelow
) -> list[bytes]:
    """A share of 32 bytes for each point; points are different numbers, from 1 on.

    ``below`` draws the coefficients, from 0 to less than its argument.

    Raises:
        ValueError: the secret has another length, or there are fewer points than the threshold.
    """
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret of {len(secret)} bytes; it must have {SECRET_BYTES}")
    if not 1 <= threshold <= len(points):
        raise ValueError(f"a threshold of {threshold} of {len(points)} shares")
    coefficients = [below(PRIME) for _ in range(threshold - 1)]
    found = []
    for point in points:
        value = 0
        for coefficient in coefficients:  # Horner's rule
            value = (value + coefficient) * point % PRIME
        found.append(((value + int.from_bytes(secret, "big")) % PRIME).to_bytes(SHARE_BYTES, "big"))
    return found


def at_zero(points: Sequence[int]) -> dict[int, int]:
    """Lagrange's factors: the value at 0 is the sum of factors times the values at the points."""
    found = {}
    for own in points:
        above, below = 1, 1
        for other in points:
            if other != own:
                above = above * other % PRIME
                below = below * (other - own) % PRIME
        found[own] = above * pow(below, -1, PRIME) % PRIME
    return found


def secret(factors: Mapping[int, int], own: Mapping[int, bytes]) -> bytes:
    """The secret from the shares at the points of ``factors``, as :func:`at_zero` gives them.

    Raises:
        ValueError: they are no shares of one secret of 32 bytes.
    """
    value = sum(factor * int.from_bytes(own[point], "big") for point, factor in factors.items())
    try:
        return (value % PRIME).to_bytes(SECRET_BYTES, "big")
    except OverflowError as error:
        raise ValueError("the shares are not those of one secret of 32 bytes") from error
