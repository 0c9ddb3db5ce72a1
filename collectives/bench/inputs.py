"""Sizes, types, and data whose reductions are predictable bit by bit."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from collectives.contracts import Member, contract
from collectives.errors import needed
from collectives.execution.memory import OPERATIONS, is_on_device

Items = npt.NDArray[Any]

#: nccl-tests' names of types, beside NumPy's.
ALIASES = {"float": "float32", "double": "float64", "half": "float16"}


def sizes(least: int, most: int, factor: int, step: int | None) -> Iterator[int]:
    """Sizes from ``least`` up to ``most``, each ``factor`` times the last or ``step`` more.

    ``most`` is always included.

    Raises:
        ValueError: the series would be empty or never end.
    """
    if least < 1 or (factor < 2 and not step):
        raise ValueError("sizes start at 1 byte or more and grow by a factor of at least 2")
    if most < least:
        raise ValueError(f"the largest buffer, {most} bytes, is below the smallest, {least} bytes")
    size = least
    while size < most:
        yield size
        size = size + step if step else size * factor
    yield most


def parse_dtype(name: str) -> np.dtype[Any]:
    """NumPy type by its name or nccl-tests'; ``ValueError`` for other names."""
    if name == "bfloat16":
        return np.dtype(needed("ml_dtypes", "bfloat16", name, ValueError).bfloat16)
    try:
        dtype = np.dtype(ALIASES.get(name, name))
    except TypeError:
        raise ValueError(
            f"no type {name!r}; NumPy's names, float, double, half or bfloat16"
        ) from None
    if dtype.kind not in "iufcb":
        raise ValueError(f"{name!r} is no numeric type")
    return dtype


def crafted(collective: str, op: str, dtype: np.dtype[Any], rank: int, size: int, n: int) -> Items:
    """``n`` small whole numbers that depend on rank and index.

    Sums stay exact in every floating type up to 64 ranks, and products are 1 or 2.
    """
    index = np.arange(n)
    if op == "prod":
        values = np.where(index % (size + 1) == rank, 2, 1)
    elif op in ("max", "min"):
        values = (7 * index + 13 * rank) % 50
    else:
        values = (index + 1) * (rank + 3) // 4 % 3
    if not contract(collective).reduces:
        values = (values + 5 * rank) % 100
    return values.astype(dtype)


def expected(
    collective: str, op: str, dtype: np.dtype[Any], rank: int, size: int, count: int
) -> Items | None:
    """Items that ``rank`` must receive if every rank sends crafted blocks of ``count`` items.

    ``None`` if it receives nothing; the root is rank 0.
    """
    blocks, member = contract(collective), Member(rank, size)
    received = []
    for i in range(blocks.recv_blocks(member)):
        value = blocks.result(member, i)
        if value is None:
            return None
        here = slice(value.chunk * count, (value.chunk + 1) * count)
        sent = [
            crafted(
                collective, op, dtype, peer, size, count * blocks.send_blocks(Member(peer, size))
            )
            for peer in value.ranks
        ]
        total = sent[0][here]
        for items in sent[1:]:
            total = OPERATIONS[op][0](total, items[here]).astype(dtype)
        received.append(total)
    return np.concatenate(received) if received else None


def put(items: Any, values: Items) -> None:
    """Writes host values of the same type into ``items``, wherever these lie."""
    if is_on_device(items):
        items.set(values)
    else:
        items[...] = values


def on_host(items: Any) -> Items:
    """``items``, or a copy on the host."""
    return items.get() if is_on_device(items) else items


def garbage(items: Items) -> None:
    """Overwrites ``items`` with bytes of no result, so that doing nothing is noticed."""
    items.view(np.uint8)[...] = 0xA5


def rounding(dtype: np.dtype[Any], rank: int, n: int) -> Items:
    """Fractions whose sum depends on the order of the additions."""
    return (np.random.default_rng(rank).random(n) * 10.0 ** (rank % 4)).astype(dtype)
