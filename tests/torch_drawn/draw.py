"""One drawn call: its numbers, which all ranks can compute, and how one rank's tensors lie."""

import random
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from math import prod
from typing import Any

import torch
import torch.distributed as dist

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
WIDE = (torch.uint16, torch.uint32, torch.uint64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
EIGHTS = (torch.float8_e4m3fn, torch.float8_e5m2)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*INTEGERS, *WIDE, *FLOATS, torch.float32, *EIGHTS, *COMPLEX, torch.bool)
#: Gloo raises for others, within its threads, and a later call of its may wait for ever.
OF_GLOO = (torch.uint8, torch.int8, torch.int32, torch.int64, *FLOATS)
SUMS_OF_GLOO = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
#: The last ones have about as many bytes as a small tensor's most.
SHAPES = ((), (0,), (1,), (7,), (4, 3), (2, 0, 3), (3, 1, 2), (16_384,), (16_385,), (130, 129))
SUMS = ("SUM", "PRODUCT", "MIN", "MAX", "AVG", "BAND", "BOR", "BXOR", "PREMUL_SUM")
FACTOR = 2.0
#: Value that lies where no call may write.
GUARD = 1

Tensor = torch.Tensor


class Lying:
    """How one rank's tensors lie.

    Args:
        rng: draws that; ``None``: all tensors are contiguous ones of their own, as Gloo wants them.
    """

    def __init__(self, rng: random.Random | None) -> None:
        self.rng = rng
        self._guards: list[Tensor] = []

    def room(self, shape: Sequence[int], dtype: torch.dtype, ways: Iterable[str] = ()) -> Tensor:
        """A tensor with wrong numbers in it."""
        plain = torch.full(tuple(shape), 2, dtype=torch.int64).to(dtype)
        if self.rng is None:
            return plain
        made = [plain, plain, plain]
        around = torch.full((*shape, 3), GUARD).to(dtype)
        made.append(around[..., 1])
        made.append(torch.full((prod(shape) + 3,), GUARD).to(dtype)[3:].view(shape))
        turned = tuple(range(plain.dim()))[::-1]
        made.append(plain.permute(turned).contiguous().permute(turned))
        if dtype in COMPLEX and "conjugate" in ways:
            made.append(plain.conj())
        if dtype in (*FLOATS, *COMPLEX):
            made.append(torch._neg_view(plain))
        if dtype in (*FLOATS, *COMPLEX) and "leaf" in ways:
            made.append(plain.requires_grad_())
        found = self.rng.choice(made)
        if found is made[3]:
            self._guards += [around[..., 0], around[..., 2]]
        return found

    def of(self, values: Tensor, *ways: str) -> Tensor:
        """A tensor of these values."""
        made = self.room(values.shape, values.dtype, ways)
        made.detach().copy_(values)
        return made

    def block(self, whole: Tensor, begin: int, part: Tensor) -> Tensor:
        """A tensor of the values of ``part``, some of the time in ``whole`` from an item on."""
        fits = whole.is_contiguous() and not (whole.is_neg() or whole.is_conj())
        if self.rng is None or not fits or self.rng.random() < 0.5:
            return self.of(part)
        inside = whole.detach().view(-1)[begin:][: part.numel()].view(part.shape)
        inside.copy_(part)
        return inside

    def is_whole(self) -> bool:
        """Whether nothing was written beside the tensors."""
        return all(
            same(guard, torch.full(guard.shape, GUARD).to(guard.dtype)) for guard in self._guards
        )


class Draw:
    """A call that all ranks of a group draw alike.

    Attributes:
        ranks: the group's members, by their numbers in the world.
        me: this rank's number in the group.
        all: draws what is the same on all ranks.
        mine: draws what this rank may do otherwise than the others.
        later: whether this rank passes ``async_op=True``.
        with_gloo: whether Gloo has such a call.
    """

    def __init__(self, seed: int, number: int, ranks: Sequence[int], rank: int) -> None:
        self._seed = f"{seed} {number}"
        self.number, self.ranks, self.size = number, ranks, len(ranks)
        self.me = ranks.index(rank)
        self.all = random.Random(self._seed)
        self.mine = self.of(self.me)
        self.later = self.mine.random() < 0.4
        self.with_gloo = True
        self._values = 0

    def of(self, member: int) -> random.Random:
        return random.Random(f"{self._seed} of {member}")

    def dtype(self) -> torch.dtype:
        found = self.all.choice(DTYPES)
        self.with_gloo &= found in OF_GLOO
        return found

    def shape(self) -> tuple[int, ...]:
        return self.all.choice(SHAPES)

    def rows(self) -> tuple[int, ...]:
        """The shape of a row or of nothing, behind a number of rows."""
        return self.all.choice(((), (1,), (3,), (2, 2), (0,), (6_000,)))

    def root(self) -> int:
        return self.all.randrange(self.size)

    def values(self, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """Small whole numbers for each member, of which four have an exact product."""
        return [self.one(member, shape, dtype) for member in range(self.size)]

    def one(self, member: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self._values += 1
        rng = random.Random(f"{self._seed} {self._values} of {member}")
        draw = torch.Generator().manual_seed(rng.getrandbits(63))
        signed = dtype not in (torch.uint8, torch.bool, *WIDE)
        low, high = (-3, 4) if signed else (0, 2 if dtype == torch.bool else 4)
        made = torch.randint(low, high, tuple(shape), generator=draw)
        if dtype.is_complex:
            return torch.complex(made.double(), made.roll(1).double()).to(dtype)
        return made.to(dtype)

    def reduction(self, dtype: torch.dtype) -> tuple[Any, Callable[[list[Tensor]], Tensor] | None]:
        """One that torch has, and the function of all ranks' tensors; ``None`` if it is refused."""
        name = self.all.choice(("SUM", "SUM", *SUMS))
        op: Any = getattr(dist.ReduceOp, name)
        is_float = dtype.is_floating_point or dtype.is_complex
        if name == "PREMUL_SUM":
            op = dist._make_nccl_premul_sum(FACTOR)
        is_refused = (
            (name in ("BAND", "BOR", "BXOR") and is_float)
            or (name in ("PRODUCT", "MIN", "MAX") and dtype.is_complex)
            or (name == "PREMUL_SUM" and not is_float)
            or (name == "AVG" and dtype == torch.bool)
        )
        self.with_gloo &= name in SUMS_OF_GLOO and not is_refused
        return op, None if is_refused else lambda every: reduced(name, every)


def reduced(name: str, every: list[Tensor]) -> Tensor:
    """The reduction of all ranks' tensors, rounded once."""
    dtype = every[0].dtype
    if dtype == torch.bool:
        ways = {"SUM": torch.logical_or, "MAX": torch.logical_or, "BOR": torch.logical_or}
        ways["BXOR"] = torch.logical_xor
        return reduce(ways.get(name, torch.logical_and), every)
    wide = torch.complex128 if dtype.is_complex else torch.int64
    numbers = torch.stack(
        [tensor.to(torch.float64 if dtype in EIGHTS else wide) for tensor in every]
    ).to(wide)
    bits = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
    if name in bits:
        return reduce(bits[name], numbers).to(dtype)
    if name in ("MIN", "MAX"):
        return (numbers.amin(0) if name == "MIN" else numbers.amax(0)).to(dtype)
    if name == "PRODUCT":
        return _narrow(numbers.prod(0), dtype)
    total = numbers.sum(0)
    if name == "PREMUL_SUM":
        return _narrow(total * int(FACTOR), dtype)
    if name == "AVG" and not (dtype.is_floating_point or dtype.is_complex):
        return torch.div(total, len(every), rounding_mode="trunc").to(dtype)
    if name == "AVG" and dtype.is_complex:
        return torch.view_as_complex(torch.view_as_real(total.to(dtype)) / len(every))
    if name == "AVG":
        kept = torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
        return total.to(kept).div(len(every)).to(dtype)
    return _narrow(total, dtype)


def _narrow(total: Tensor, dtype: torch.dtype) -> Tensor:
    return total.to(torch.float32).to(dtype) if dtype in EIGHTS else total.to(dtype)


def same(found: Any, expected: Any) -> bool:
    """Whether two results are equal to the bit; tensors have no values but numbers."""
    if not isinstance(expected, torch.Tensor):
        return bool(found == expected)
    found = found.detach().resolve_neg().resolve_conj().contiguous()
    expected = expected.detach().contiguous()
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if found.dtype in (*FLOATS, *EIGHTS, *COMPLEX):  # minus zero is zero
        wide = torch.complex128 if found.is_complex() else torch.float64
        found, expected = found.to(wide), expected.to(wide)
    return torch.equal(found.reshape(-1), expected.reshape(-1))
